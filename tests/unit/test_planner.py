"""Claims about the plan: its queue is a queue, and it says what it assumed."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from components.planning import capacity, model_shapes
from components.planning.rollout_simulator import Load, Rollout, Samplers, draw, enough_judges, simulate

SMALL = Load(
    trajectories=40,
    turns=4,
    turns_spread=0.5,
    max_turns=12,
    tokens=100,
    tokens_spread=0.5,
    max_tokens=400,
    context=100_000,
    observation_tokens=50,
    judged_share=0.5,
    judge_seconds=2,
    judge_spread=0.3,
    tool_seconds=1,
)
FAST = Samplers(sequence_rate=50, total_rate=1e9, in_flight=40)


def rollout(load: Load, judges: int, seed: int = 0, samplers: Samplers = FAST) -> Rollout:
    return simulate(draw(load, seed), samplers, judges)


def test_with_one_judge_the_step_lasts_as_long_as_all_judgements() -> None:
    load = replace(SMALL, turns=1, turns_spread=0, tokens=1, tokens_spread=0, judge_spread=0)
    found = rollout(load, 1)
    assert found.seconds == pytest.approx(40 * 2, rel=0.03) and found.judgements == 40
    assert found.busy == pytest.approx(1, abs=0.03) and found.wait_mean == pytest.approx(39, rel=0.05)
    assert np.diff(found.ends) == pytest.approx(2, rel=0.03), "first come, first served"


def test_without_a_queue_nobody_waits_and_time_is_the_longest_trajectory() -> None:
    load = replace(SMALL, turns=5, turns_spread=0, tokens_spread=0, judge_spread=0, judged_share=1.0)
    found = rollout(load, 40)
    assert (
        found.seconds == pytest.approx(5 * (100 / 50 + 2), rel=0.03)
        and found.wait_p95 < 0.1
        and found.longest_queue == 0
    )


def test_sequences_share_the_samplers_rate() -> None:
    load = replace(SMALL, turns=1, turns_spread=0, tokens_spread=0, judge_seconds=0.01)
    shared = replace(FAST, total_rate=500)
    assert rollout(load, 40, samplers=shared).seconds == pytest.approx(40 * 100 / 500, rel=0.03)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 39), st.integers(0, 1000))
def test_more_judges_judge_the_same_and_hardly_ever_later(judges: int, seed: int) -> None:
    few, many = rollout(SMALL, judges, seed), rollout(SMALL, judges + 1, seed)
    assert few.judgements == many.judgements and few.tokens == many.tokens
    # A list schedule may lose a little by an extra server (Graham's anomaly), never half.
    assert many.seconds <= few.seconds * 1.5


def test_the_judges_needed_are_the_fewest_that_do() -> None:
    needed = enough_judges(draw(SMALL, 0), FAST, 1.05)
    free = rollout(SMALL, SMALL.trajectories).seconds
    assert rollout(SMALL, needed).seconds <= 1.05 * free < rollout(SMALL, needed - 1).seconds


def test_trajectories_wait_until_others_end_and_more_run_while_the_cache_has_room() -> None:
    load = replace(SMALL, turns=5, turns_spread=0, tokens_spread=0, judge_spread=0, judged_share=1.0)
    alone = rollout(load, 40).seconds
    assert rollout(load, 40, samplers=replace(FAST, in_flight=20)).seconds == pytest.approx(
        2 * alone, rel=0.03
    )
    roomy = replace(FAST, in_flight=10, cache_tokens=10 * load.context)
    full = replace(FAST, in_flight=10, cache_tokens=1000)
    assert rollout(load, 40, samplers=roomy).seconds < 3.5 * alone
    assert rollout(load, 40, samplers=full).seconds == pytest.approx(4 * alone, rel=0.05)


def test_training_is_hidden_behind_sampling_that_goes_on() -> None:
    load = replace(SMALL, turns=5, turns_spread=0, tokens_spread=0, judge_spread=0, judged_share=1.0)
    work, sampled = draw(load, 0, steps=6), rollout(load, 40).seconds

    def steps(staleness: int, *, pauses: bool = False) -> float:
        train = 0.9 * sampled
        found = simulate(work, FAST, 40, steps=6, staleness=staleness, train_seconds=train, pauses=pauses)
        return float(found.trained[-1])

    assert steps(0) == pytest.approx(6 * 1.9 * sampled, rel=0.03)
    assert steps(1) == pytest.approx(6 * sampled + 0.9 * sampled, rel=0.05)
    assert steps(1) < steps(1, pauses=True) <= steps(0)


def test_every_input_says_where_it_comes_from_and_can_be_replaced() -> None:
    shapes = model_shapes.named_shapes("Qwen3-32B")
    inputs = capacity.default_inputs(resolve("h20-pool").params, capacity.GPUS["h20"], shapes)
    assert {item.origin for item in inputs.values()} == {"parameter", "measured", "datasheet", "assumed"}
    changed = capacity.assume(inputs, ["parameters=230e9", "price=3"])
    assert changed["active_parameters"].value == 230e9 and changed["price"].origin == "assumed"
    for wrong in ("prize=3", "price=cheap", "price=-1"):
        with pytest.raises(UserError, match="--assume"):
            capacity.assume(inputs, [wrong])


def test_a_slow_judge_is_named_as_the_bottleneck_and_more_judges_are_asked_for() -> None:
    params = resolve(
        "h20-pool", ("pool.judges=4", "warmup.rollouts.tasks=64", "agentic.rollouts.tasks=64")
    ).params
    shapes = model_shapes.named_shapes("Qwen3-8B")
    inputs = capacity.default_inputs(params, capacity.GPUS["h20"], shapes)
    choices = ["judge_seconds=600", "sampler_gpus=8"]
    found = capacity.plan(params, shapes, capacity.assume(inputs, choices))
    assert found["stages"]["agentic"]["bottleneck"] == "judging" and found["judges"]["needed"] > 4
    assert found["cost"] == pytest.approx(found["gpu_hours"] * found["inputs"]["price"]["value"])
    tail = found["stages"]["agentic"]["tail"]
    assert tail["half_done"] < tail["p90"] <= tail["p99"] <= tail["last"]


def test_what_the_trajectories_of_a_home_measured_takes_the_place_of_what_was_assumed() -> None:
    found = capacity.measured_inputs([1, 4, 16], [100, 100, 100])
    assert found["turns"].value == pytest.approx(4) and found["tokens_spread"].value == 0
    assert all(item.origin == "measured" for item in found.values())


def test_the_command_prints_one_object_and_refuses_a_profile_of_the_cpu() -> None:
    command = [
        sys.executable,
        "-m",
        "components.cli",
        "plan",
        "--json",
        "--set",
        "warmup.rollouts.tasks=16",
        "--set",
        "agentic.rollouts.tasks=16",
    ]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) >= {
        "memory_bytes_per_gpu",
        "stages",
        "judges",
        "gpu_hours",
        "cost",
        "inputs",
        "left_out",
    }
    refused = subprocess.run(
        [*command, "--profile", "smoke"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert (
        refused.returncode == 2 and "device=cuda" in refused.stderr and len(refused.stderr.splitlines()) == 1
    )


DOCUMENTED = re.findall(
    r"```console\n\$ (cuda-agent plan [^\n]+)\n(.+?)```",
    (PROJECT / "docs" / "training.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(("command", "printed"), DOCUMENTED, ids=[command for command, _ in DOCUMENTED])
def test_the_documented_tables_are_what_the_command_prints(
    command: str, printed: str, tmp_path: Path
) -> None:
    # Small rollouts make the simulation fast; the memory does not depend on them.
    small = ["--set", "warmup.rollouts.tasks=2", "--set", "agentic.rollouts.tasks=2"]
    arguments = [sys.executable, "-m", "components.cli", *command.split()[1:], *small]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "does not fit" in printed else 0), done.stderr
    lines = [line.rstrip() for line in done.stderr.splitlines()]
    assert "\n".join(lines).startswith(printed)


def test_every_profile_of_a_public_model_has_a_documented_table() -> None:
    documented = {command.split("--profile ")[1].split()[0] for command, _ in DOCUMENTED}
    assert documented == set(model_shapes.PROFILE_MODELS)


def test_a_plan_without_a_folder_or_a_profile_asks_for_a_model(tmp_path: Path) -> None:
    policy = resolve("hf", (f"policy.source={tmp_path / 'nowhere'}",)).params.policy
    assert model_shapes.policy_shapes(policy, "hf").name == "Qwen3-8B"
    with pytest.raises(
        UserError, match=r"policy\.source: .*nowhere is no folder; .* with --model \(Qwen3-8B,"
    ):
        model_shapes.policy_shapes(policy, "mine")
    with pytest.raises(UserError, match="--model Qwen9: no such model; give one of Qwen3-8B"):
        model_shapes.named_shapes("Qwen9")
    (tmp_path / "config.json").write_text(json.dumps(model_shapes.CONFIGURATIONS["Llama-3.1-8B"]))
    found = model_shapes.policy_shapes(policy.model_copy(update={"source": str(tmp_path)}), "hf")
    assert found.parameters == 8_030_261_248 and found.name == str(tmp_path / "config.json")
    champion = policy.model_copy(update={"source": "champion", "base": str(tmp_path)})
    assert model_shapes.policy_shapes(champion, "hf") == found
