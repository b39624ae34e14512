"""Claims about the plan of a pool: what fills a GPU of each role, and what is refused."""

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
import yaml
from layer_memory import kept_sizes
from public_models import CONFIGURATIONS, PROFILE_MODELS, config_of, public_shapes
from transformers import AttentionInterface, AutoModelForCausalLM
from typer.testing import CliRunner

from components.cli import doctor
from components.cli.main import app
from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from components.core.progress import Quiet
from components.planning.memory_model import CONTEXT_BYTES, REDUCE_BUCKET, Roles, rank_memory
from components.planning.model_shapes import policy_shapes
from components.planning.role_memory import (
    ASLEEP_BYTES,
    GPU_BYTES,
    VLLM_WORKING_BYTES,
    RoleMemory,
    memory_of_roles,
    refusal,
    tensor_parallel,
    trainer_bytes,
)
from components.training.run_stage import check_stages
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
    config = config_of(CONFIGURATIONS[name] | {"num_hidden_layers": layers})
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
    config = CONFIGURATIONS[name]
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
    shapes = public_shapes(name)
    planned = rank_memory(shapes, engine, Roles(True, True), ranks=ranks, tokens=tokens, row=tokens)
    assert planned.total == pytest.approx(counted, rel=0.1)

    # The sampler: weights of one worker, and the cache from the widths of the modules.
    attention = one.model.layers[0].self_attn
    token_bytes = 2 * layers * (attention.k_proj.out_features + attention.v_proj.out_features)
    params = resolve("h20-pool").params
    sampler, workers = memory_of_roles(params, shapes)["samplers"], tensor_parallel(params, shapes)
    assert workers is not None and workers <= sampler.gpus
    assert sampler.parts["weights"] == pytest.approx(2 * parameters / workers, rel=0.01)
    room = workers * (0.9 * 96e9 - VLLM_WORKING_BYTES) - 2 * parameters
    contexts = sampler.gpus // workers * int(room // (token_bytes * params.policy.context))
    assert sampler.holds == f"{contexts} full contexts in servers of {workers} GPUs"
    assert sampler.total == pytest.approx(0.9 * 96e9)


def test_a_server_in_float32_holds_half_as_many_values() -> None:
    params, shapes = resolve("hf", ("engine.dtype=float32",)).params, public_shapes("Qwen3-8B")
    sampler = memory_of_roles(params, shapes)["samplers"]
    assert sampler.parts["weights"] == pytest.approx(4 * shapes.parameters)
    token_bytes = 2 * 4 * shapes.layers * shapes.kv_heads * shapes.head_dim
    contexts = int(sampler.parts["cache"] // (token_bytes * params.policy.context))
    assert sampler.holds == f"{contexts * sampler.gpus} full contexts in servers of 1 GPUs"


@pytest.mark.parametrize(
    ("model", "sets", "sentence"),
    [
        (
            "Qwen3-32B",
            ("engine.cpu_offload=false",),
            r"^pool\.trainers: 4 ranks that train Qwen3-32B need \d+ GB .* and it has 80; raise pool\.tr",
        ),
        (
            "Qwen2.5-Coder-7B",
            ("pool.trainers=8", "engine.sequence_parallel=8"),
            r"^engine\.sequence_parallel: 8 ranks cannot share the sequences of Qwen2\.5-Coder-7B \(28 heads",
        ),
        ("gpt-oss-20b", ("engine.sequence_parallel=2",), r"4 ranks|eager attention\); take"),
        (
            "Qwen3-32B",
            ("pool.trainers=64", "pool.samplers=1"),
            r"^pool\.samplers: vLLM on 1 GPUs .* \(66 GB\) .*; set pool\.samplers to 2\.$",
        ),
        (
            "Qwen3-32B",
            ("pool.trainers=128", "engine.sequence_parallel=2", "pool.samplers=2", "engine.dtype=float32"),
            r"^pool\.samplers: .* \(131 GB\) .* of 32,768 tokens \(17 GB\); set pool\.samplers to 4\.$",
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
    found = refusal(resolve("hf", sets).params, public_shapes(model))
    assert re.search(sentence, found), found
    assert "\n" not in found and found.count(". ") == 0


@pytest.mark.parametrize(
    ("profile", "gpu"),
    [
        *(("", "h20"), ("smoke", "h20"), ("h200", "h200"), ("hf", "h100"), ("hf", "h20")),
        *(("hf-adapter", "h100"), ("h20-pool", "h20"), ("smollm2", "h100")),
    ],
)
def test_every_profile_fits_its_own_gpus_with_a_tenth_to_spare(profile: str, gpu: str) -> None:
    servers = "policy.servers=[http://127.0.0.1:8000]"
    params = resolve(profile, ("device=cuda", f"pool.gpu={gpu}", servers)).params
    model = PROFILE_MODELS.get(profile)
    shapes = public_shapes(model) if model else policy_shapes(params)
    assert refusal(params, shapes) == ""
    assert memory_of_roles(params, shapes)["trainers"].total <= 0.9 * GPU_BYTES[gpu]
    if model:
        assert params.policy.context <= params.engine.tokens_per_microbatch
        check_stages(params)
        for ppo in (params.warmup, params.agentic):
            assert ppo.advantages == "critic" or ppo.rollouts.samples > 1


@pytest.mark.parametrize(("profile", "gpu"), [("smollm2", "h100"), ("hf-adapter", "h100")])
def test_a_judge_that_shares_the_trainers_gpu_has_memory_for_a_task(profile: str, gpu: str) -> None:
    params = resolve(profile, ("device=cuda", f"pool.gpu={gpu}")).params
    trainer = trainer_bytes(params, public_shapes(PROFILE_MODELS[profile]))
    sampler = params.policy.gpu_memory_share * GPU_BYTES[gpu]
    assert trainer > 5e9 and params.sandbox.device_bytes <= GPU_BYTES[gpu] - sampler - trainer


def test_profiles_of_hugging_face_models_are_those_that_a_public_model_stands_for() -> None:
    profiles = yaml.safe_load((PROJECT / "params.yaml").read_text())["profiles"]
    adopted = {name for name in profiles if resolve(name).params.policy.source != "scratch"}
    assert adopted == set(PROFILE_MODELS)


def trainer(profile: str, *sets: str) -> RoleMemory:
    return memory_of_roles(resolve(profile, sets).params, public_shapes("Qwen3-8B"))["trainers"]


def test_without_a_critic_the_plan_is_smaller_by_the_critics_states() -> None:
    parameters = public_shapes("Qwen3-8B").parameters
    for stage, ranks in ((3, 6), (2, None)):
        sets = ("engine.cpu_offload=false", "pool.trainers=6", f"engine.zero_stage={stage}", "pool.gpu=h200")
        groups = trainer("hf", *sets, "warmup.advantages=group", "agentic.advantages=group")
        # Under ZeRO 2 the weights are whole on each rank, and the other 16 bytes are divided.
        states = 18 * parameters / ranks if ranks else (2 + 16 / 6) * parameters
        assert trainer("hf", *sets).total - groups.total == pytest.approx(states)


def test_adapters_train_only_their_own_parameters() -> None:
    parameters, adapters = public_shapes("Qwen3-8B").parameters, 2 * 43_646_976
    states = 2 * parameters + 18 * adapters
    assert trainer("hf-adapter").parts["states"] == pytest.approx(states)
    # A critic has adapters and frozen weights of its own; vLLM leaves no room for it on this GPU.
    critic = trainer("hf-adapter", "agentic.advantages=critic")
    assert critic.parts["states"] == pytest.approx(2 * states) and critic.total > 80e9


def test_a_sampler_on_the_same_gpu_takes_its_share_while_it_is_awake() -> None:
    shared = ("policy.weight_transfer=ipc", "pool.samplers=0", "pool.judges=0", "pool.gpu=h20")
    awake, apart = trainer("hf", *shared, "policy.sleep=false"), trainer("hf", "pool.gpu=h20")
    assert awake.parts["sampler"] == pytest.approx(0.4 * 96e9) and apart.parts["sampler"] == 0
    asleep = trainer("hf", *shared, "policy.sleep=true", "policy.gpu_memory_share=0.1")
    assert asleep.parts["sampler"] == ASLEEP_BYTES
    assert asleep.host - apart.host == 2 * public_shapes("Qwen3-8B").parameters
    sampling = trainer("hf-adapter").parts
    assert sampling["sampler"] == pytest.approx(0.5 * 80e9) and sampling["judge or new weights"] == 8e9


def test_a_run_asks_the_plan_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dataset(*_: Any) -> None:
        raise AssertionError("the pipeline began to make its data set")

    monkeypatch.setattr(nightly, "dataset", dataset)
    config = CONFIGURATIONS["Qwen3-32B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    sets = (
        f"policy.source={tmp_path}",
        "engine.cpu_offload=false",
        "evaluation.suite=held-out",
        "evaluation.levels=[]",
    )
    night: Any = SimpleNamespace(params=resolve("hf", sets).params)
    needs = r"^pool\.trainers: 4 ranks that train .* need"
    with pytest.raises(UserError, match=needs):
        nightly.nightly_pipeline(night, Quiet())
    with pytest.raises(UserError, match=needs):
        doctor.pool(night.params)


DOCUMENTED = re.findall(
    r"```console\n\$ (cuda-agent plan [^\n]+)\n(.+?)```",
    (PROJECT / "docs" / "training.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(("command", "printed"), DOCUMENTED, ids=[command for command, _ in DOCUMENTED])
def test_the_documented_tables_are_what_the_command_prints(
    command: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that does not fit is named in the last line, and the exit code is 2."""
    profile = command.split("--profile ")[1].split()[0]
    folder = tmp_path / resolve(profile).params.policy.source
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[PROFILE_MODELS[profile]]))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*command.split()[1:], "--json"])
    assert done.exit_code == (2 if "refused:" in printed else 0), done.stderr
    assert [line.rstrip() for line in done.stderr.splitlines()] == printed.splitlines()
    record = json.loads(done.stdout)
    assert record["refused"] == (printed.splitlines()[-1].removeprefix("refused: ") if done.exit_code else "")
    assert set(record["roles"]) >= {"trainers", "samplers"}


def test_every_profile_of_a_public_model_has_a_documented_table() -> None:
    documented = {command.split("--profile ")[1].split()[0] for command, _ in DOCUMENTED}
    assert documented == set(PROFILE_MODELS)


@pytest.mark.parametrize(
    ("profile", "sentence"), [("smoke", "device=cuda"), ("h20-pool", "policy.source: models/policy")]
)
def test_a_profile_that_cannot_be_planned_is_one_sentence(
    profile: str, sentence: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "components.cli", "plan", "--profile", profile]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_doctor_says_what_of_the_pool_is_there() -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there, nobody = f"http://127.0.0.1:{server.server_port}", "http://127.0.0.1:9"
        params = resolve("hf-adapter", (f"policy.servers=[{there},{nobody}]",)).params
        with pytest.raises(UserError, match=f"^1 of 2 vLLM servers answer; .* from {nobody};"):
            doctor.samplers(params)
        alone = resolve("hf-adapter", (f"policy.servers=[{there}]",)).params
        assert doctor.samplers(alone) == "1 of 1 vLLM servers answer"
        server.shutdown()
    assert doctor.pool(params) == "the process of the run trains and judges"
