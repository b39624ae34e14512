"""The reward of a trajectory: the milestone, or a function of one's own that a parameter names."""

import functools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from training_fixtures import params

from components.agent.rewards import load_reward, milestone, reward_of
from components.agent.trajectory import Trajectory
from components.core.errors import UserError
from components.judge.verdict import Ratio, Speedup, Verdict
from flows.stage_keys import READS, key_parts

FAST = Ratio(estimate=2.0, low=1.5, high=2.5)


def trajectory(*verdicts: Verdict) -> Trajectory:
    return Trajectory("task", (1, 2), (0, 1), (0.0, -1.0), (), verdicts, 0.0, "stop", "v0")


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        (Verdict(status="build_failed"), -1.0),
        (Verdict(status="correct"), 1.0),
        (Verdict(status="correct", speedup=Speedup(eager=FAST)), 2.0),
        (Verdict(status="correct", speedup=Speedup(eager=FAST, compile=FAST)), 3.0),
    ],
)
def test_the_milestone_is_that_of_the_final_verdict_alone(final: Verdict, expected: float) -> None:
    assert milestone(trajectory(Verdict(status="crashed"), final)) == expected
    assert load_reward(params().reward) is milestone


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "3"])
def test_a_reward_that_is_no_finite_number_is_named_with_its_function(value: object) -> None:
    def broken(_: Trajectory) -> Any:
        return value

    with pytest.raises(UserError, match=r"params\.yaml: reward: .*broken returned .* let it return a finite"):
        reward_of(trajectory(Verdict(status="correct")), broken)


class Broken:
    def __call__(self, _: Trajectory) -> Any:
        return None


def test_a_reward_may_be_any_callable_object() -> None:
    for function in (functools.partial(lambda _: None), Broken()):
        with pytest.raises(UserError, match=r"(partial|Broken) returned None for a trajectory"):
            reward_of(trajectory(Verdict(status="correct")), function)


def test_the_source_of_a_function_of_ones_own_is_part_of_the_keys_of_the_stages_that_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(constant: str) -> dict[str, str]:
        folder = tmp_path / constant
        folder.mkdir()
        (folder / "own_reward.py").write_text(f"def own(trajectory):\n    return {constant}\n")
        monkeypatch.syspath_prepend(folder)
        sys.modules.pop("own_reward", None)
        made = params("reward=own_reward.own")
        assert reward_of(trajectory(Verdict(status="correct")), load_reward(made.reward)) == float(constant)
        return {name: key_parts(made, name, {}, 0).key for name in READS}

    first, second = keys("0.5"), keys("0.25")
    sys.modules.pop("own_reward", None)
    assert {name for name in READS if first[name] != second[name]} == {"warmup", "rejection", "agentic"}
