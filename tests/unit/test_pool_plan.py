"""Claims about the plan of a pool: what fills a GPU of each role, what is refused, and what is proposed."""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_memory import kept_sizes
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from components.agent.trajectory import Trajectory, Turn, save_trajectories
from components.cli import doctor
from components.cli.params import home_inputs
from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from components.core.progress import Quiet
from components.judge.verdict import Verdict
from components.planning import capacity, model_shapes, placement_search, role_memory, sampler_memory
from components.planning.memory_choices import memory_plan
from components.planning.memory_model import CONTEXT_BYTES, REDUCE_BUCKET, Roles, rank_memory
from flows import nightly


class Fused(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps: queries, keys, values and its output."""

    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(queries)
        ctx.save_for_backward(queries, keys, values, output)
        return output


AttentionInterface.register(
    "fused",
    lambda module, queries, keys, values, mask, **_: (
        Fused.apply(queries, keys, values).transpose(1, 2).contiguous(),
        None,
    ),
)


def meta_model(name: str, layers: int) -> Any:
    fields = model_shapes.CONFIGURATIONS[name] | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(
        fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"}
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="fused")


def bytes_of_a_layer(model: Any, tokens: int) -> int:
    """Return the bytes that a layer of the model keeps for its backward pass, and of two gradients."""
    sizes = kept_sizes(model, tokens)
    return sum(sizes) + 2 * max(sizes)


# The shapes of Qwen2.5-Coder-7B are those of Qwen2.5-7B.
@pytest.mark.parametrize(
    ("name", "ranks", "tokens"),
    [("Qwen2.5-Coder-7B", 8, 16384), ("Qwen3-32B", 64, 32768), ("Qwen3-30B-A3B", 64, 32768)],
)
def test_planned_memory_is_that_counted_from_the_modules_within_a_tenth(
    name: str, ranks: int, tokens: int
) -> None:
    config = model_shapes.CONFIGURATIONS[name]
    one, two = meta_model(name, 1), meta_model(name, 2)
    layer = two.num_parameters() - one.num_parameters()
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    parameters = one.num_parameters() + (layers - 1) * layer
    outside = 2 * config["vocab_size"] * hidden

    counted = (
        2 * 18 * parameters / ranks  # actor, critic: weights, gradients, master weights, two moments
        + 2 * parameters / ranks  # reference
        + 2 * (2 * layer + outside)  # gathered: two layers, embeddings and head
        + 2 * 2 * layer  # gradients of two layers
        + 4 * REDUCE_BUCKET
        + 2 * tokens * hidden * layers  # inputs of the layers
        + bytes_of_a_layer(one, tokens)
        + CONTEXT_BYTES
    )
    sets = {"sequence_parallel": 1, "mlp_tokens": 0}
    engine = resolve("h20-pool").params.engine.model_copy(update=sets)
    shapes = model_shapes.named_shapes(name)
    planned = rank_memory(shapes, engine, Roles(True, True), ranks=ranks, tokens=tokens, row=tokens)
    assert planned.total == pytest.approx(counted, rel=0.1)

    # The sampler: weights of one worker, and the cache from the widths of the modules.
    attention = one.model.layers[0].self_attn
    token_bytes = 2 * layers * (attention.k_proj.out_features + attention.v_proj.out_features)
    params, values = inputs_of("h20-pool", name)
    sampler = sampler_memory.sampler_memory(params, values)
    workers = sampler["tensor_parallel"]
    assert sampler["bytes"]["weights"] == pytest.approx(2 * parameters / workers, rel=0.01)
    room = workers * (0.9 * 96e9 - sampler_memory.VLLM_WORKING_BYTES) - 2 * parameters
    contexts = sampler["replicas"] * (room // (token_bytes * params.policy.context))
    assert sampler["contexts"] == pytest.approx(contexts) and sampler["fits"]
    assert sum(sampler["bytes"].values()) == pytest.approx(0.9 * 96e9)


def inputs_of(profile: str, model: str, *sets: str) -> tuple[Any, dict[str, float]]:
    params = resolve(profile, sets).params
    shapes = model_shapes.named_shapes(model)
    inputs = capacity.default_inputs(params, capacity.GPUS[params.pool.gpu], shapes)
    return params, {key: item.value for key, item in inputs.items()}


@pytest.mark.parametrize(
    ("model", "sets", "sentence"),
    [
        (
            "Qwen3-32B",
            ("engine.cpu_offload=false",),
            r"^pool\.trainers: 4 ranks that train Qwen3-32B need \d+ GB .* and it has 80; .*=true\.$",
        ),
        ("Qwen3-32B", ("pool.trainers=1",), r"and it has 80; raise pool\.trainers, use policy\.adapter"),
        (
            "Qwen3-32B",
            ("pool.trainers=64", "pool.samplers=1"),
            r"^pool\.samplers: vLLM on 1 GPUs .* \(66 GB\) .*; set pool\.samplers to 2\.$",
        ),
        (
            "Qwen3-8B",
            ("policy.gpu_memory_share=0.2", "pool.samplers=0"),
            r"^policy\.gpu_memory_share: vLLM on 1 .* of 32,768 tokens \(5 GB\); raise it\.$",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_one_sentence_that_mends_it(
    model: str, sets: tuple[str, ...], sentence: str
) -> None:
    params, values = inputs_of("hf", model, *sets)
    shapes = model_shapes.named_shapes(model)
    found = role_memory.refusal(params, shapes, values, memory_plan(params, shapes, values))
    assert re.search(sentence, found), found
    assert "\n" not in found and found.count(". ") == 0


@pytest.mark.parametrize("profile", ["", "smoke", "h200", "hf", "hf-adapter", "h20-pool"])
def test_every_profile_fits_its_own_gpus(profile: str) -> None:
    params = resolve(profile, ("device=cuda",)).params
    shapes = model_shapes.policy_shapes(params.policy, profile)
    inputs = capacity.default_inputs(params, capacity.GPUS[params.pool.gpu], shapes)
    values = {key: item.value for key, item in inputs.items()}
    assert role_memory.refusal(params, shapes, values, memory_plan(params, shapes, values)) == ""


def test_a_run_asks_the_plan_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dataset(*_: Any) -> None:
        raise AssertionError("the pipeline began to make its data set")

    monkeypatch.setattr(nightly, "dataset", dataset)
    config = model_shapes.CONFIGURATIONS["Qwen3-32B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    sets = (
        f"policy.source={tmp_path}",
        "engine.cpu_offload=false",
        "evaluation.suite=held-out",
        "evaluation.levels=[]",
    )
    night: Any = SimpleNamespace(params=resolve("hf", sets).params)
    with pytest.raises(UserError, match=r"^pool\.trainers: 4 ranks that train .*config\.json need"):
        nightly.nightly_pipeline(night, Quiet())
    # A type of model that cannot be planned is not refused.
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    role_memory.check_fits(night.params)


def test_proposed_placements_hold_and_none_is_worse_than_the_pool() -> None:
    sets = ("warmup.rollouts.tasks=2", "agentic.rollouts.tasks=2")
    params = resolve("hf", sets).params
    shapes = model_shapes.named_shapes("Qwen3-8B")
    inputs = capacity.default_inputs(params, capacity.GPUS["h100"], shapes)
    given = capacity.plan(params, shapes, inputs)
    found = placement_search.placements(params, shapes, inputs, given["hours"])
    assert found["cheapest"]["gpu_hours"] <= given["gpu_hours"]
    assert found["fastest"]["hours"] <= given["hours"]
    for best in (found["cheapest"], found["fastest"]):
        roles = {key: best[key] for key in ("trainers", "samplers", "judges")}
        assert sum(roles.values()) <= 8 or best is found["cheapest"]
        placed = resolve("hf", (*sets, *(f"pool.{key}={value}" for key, value in roles.items()))).params
        again = capacity.default_inputs(placed, capacity.GPUS["h100"], shapes)
        values = {key: item.value for key, item in again.items()}
        assert placement_search.fits(placed, memory_plan(placed, shapes, values))
        assert capacity.plan(placed, shapes, again)["hours"] == pytest.approx(best["hours"])
    shared = resolve("hf-adapter").params
    assert placement_search.placements(shared, shapes, inputs, 1.0) == {}


def plan(*arguments: str) -> tuple[int, dict[str, Any], str]:
    small = ("--set", "warmup.rollouts.tasks=2", "--set", "agentic.rollouts.tasks=2")
    command = [sys.executable, "-m", "components.cli", "plan", "--json", *arguments, *small]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_command_ends_with_the_sentence_and_exit_code_2_if_a_role_cannot_fit() -> None:
    code, record, text = plan("--profile", "hf", "--set", "pool.trainers=1", "--model", "Qwen3-32B")
    assert code == 2 and record["refused"].startswith("pool.trainers: 1 ranks")
    assert text.splitlines()[-1] == f"refused: {record['refused']}"


def test_only_trajectories_of_the_same_profile_and_rollouts_are_measurements(tmp_path: Path) -> None:
    """A run of another profile in the home, with two turns of ten tokens, does not plan this one."""
    wanted = resolve("hf-adapter", ("agentic.rollouts.tasks=2",)).params.model_dump(mode="json")
    for index, (profile, tasks) in enumerate((("smoke", 2), ("hf-adapter", 3), ("hf-adapter", 2))):
        stage, run = tmp_path / "stages" / f"agentic-{index}", tmp_path / "runs" / str(index)
        save_trajectories(stage / "trajectories" / "step-0", [trajectory(turns=2 + 5 * index)])
        rollouts = wanted["agentic"]["rollouts"] | {"tasks": tasks}
        settings = {"params": wanted | {"agentic": {"rollouts": rollouts}}}
        run.mkdir(parents=True)
        (run / "settings.json").write_text(json.dumps(settings))
        stages = [{"name": "agentic", "checkpoint": str(stage / "checkpoint")}]
        (run / "run.json").write_text(json.dumps({"profile": profile, "stages": stages}))
    for profile, turns in (("hf-adapter", {"turns": pytest.approx(12)}), ("hf", {})):
        found = home_inputs(resolve(profile, ("agentic.rollouts.tasks=2", f"home={tmp_path}")))
        assert {key: item.value for key, item in found.items() if key == "turns"} == turns


def trajectory(turns: int) -> Trajectory:
    turn = Turn("")
    tokens, ones = [1] * 10 * turns, [1] * 10 * turns
    verdicts = (Verdict(status="correct"),)
    return Trajectory("task", tokens, ones, [-0.5] * 10 * turns, (turn,) * turns, verdicts, 1.0, "stop", "v0")


def test_doctor_says_what_of_the_pool_is_there() -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there, nobody = f"http://127.0.0.1:{server.server_port}", "http://127.0.0.1:9"
        params = resolve("hf-adapter", (f"policy.servers=[{there},{nobody}]",)).params
        (found,) = doctor.samplers(params)
        server.shutdown()
    assert not found.here and found.found == "1 of 2 vLLM servers answer" and nobody in found.cost
    assert there not in found.cost
    assert doctor.pool(params) == "the process of the run trains and judges"
    assert doctor.samplers(resolve("smoke").params) == []
