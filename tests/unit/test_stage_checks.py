"""Settings that a stage would refuse are refused before anything is sampled."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Quiet
from components.training.stage import check_stages
from flows import nightly


def params(folder: Path, *sets: str) -> Params:
    return resolve("ci", (f"policy.source={folder}", *sets)).params


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (("engine.zero_stage=0", "engine.dtype=bfloat16"), r"engine\.zero_stage: .* set it to 1"),
        (("engine.sequence_parallel=2", "engine.zero_stage=0"), r"sequence_parallel: .* 1 or more"),
        (("engine.sequence_parallel=2", "engine.zero_stage=2"), r"sequence_parallel: .*\.zero_stage to 3"),
        (
            ("engine.sequence_parallel=2", "engine.zero_stage=3", "engine.ranks=3"),
            r"engine\.ranks: 3 ranks .* multiple",
        ),
        (("rejection.replay_share=0.5",), r"rejection\.replay_share: .* set it to 0\."),
        (
            ("rejection.replay_share=0", "policy.backend=vllm-server", "policy.server=''"),
            r"policy\.server: is empty",
        ),
        (
            (
                *("rejection.replay_share=0", "rejection.rollouts.tasks=1"),
                *("warmup.steps=1", "warmup.rollouts.tasks=1", "warmup.solve_rate_share=0"),
            ),
            r"warmup\.rollouts\.tasks: .* raise it to 2",
        ),
    ],
)
def test_a_setting_that_a_later_stage_refuses_is_refused_at_once(
    sets: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = params(tmp_path, *sets)
    with pytest.raises(UserError, match=sentence):
        check_stages(wrong)

    def dataset(*_: Any) -> None:
        raise AssertionError("the pipeline began to make its data set")

    monkeypatch.setattr(nightly, "dataset", dataset)
    night: Any = SimpleNamespace(params=wrong)
    with pytest.raises(UserError, match=sentence):
        nightly.nightly_pipeline(night, Quiet())


def test_every_profile_passes_and_only_the_stages_to_run_are_checked(tmp_path: Path) -> None:
    for profile in ("ci", "smoke"):
        check_stages(resolve(profile).params)
    check_stages(params(tmp_path, "rejection.replay_share=0"))
    check_stages(params(tmp_path, "rejection.replay_share=0.01"), ("rejection",))
    check_stages(params(tmp_path, "rejection.replay_share=0.5"), ("warmup", "critic", "agentic"))
