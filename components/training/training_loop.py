"""Training loop of all stages: running the steps of a stage and writing its result.

A stage builds its engines, calls `resumable_state.resume` on them, then `fit` with a function that trains one
step, and then `finish`. What a step computes depends only on the state and on the step's number, so a resumed
stage ends with bitwise the same weights as one that was never interrupted.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.core.files import read_json, write_json
from components.core.task import dataset_version
from components.policy.checkpoint import save_checkpoint, verify_checkpoint
from components.training.collapse_detection import Collapsed, Terminated, sigterm_deferred
from components.training.engine import NotFinite
from components.training.metrics_file import Figures
from components.training.resumable_state import TrainState
from components.training.stage import CHECKPOINT, RESULT, TASKS, UNFINISHED, StageResult

# The next step is expected to take as long as the longest of this number of newest steps.
EXPECTED_FROM = 3


@dataclass
class StepRecord:
    """Metrics that a running step has collected so far, with times and throughputs of its phases."""

    figures: Figures = field(default_factory=dict)
    # The time.monotonic() at which the step began, and at which its present phase began.
    started: float = field(default_factory=time.monotonic)
    phase_started: float = field(default_factory=time.monotonic)

    def end_phase(self, phase: str, tokens: int = 0) -> None:
        """Record the seconds since the previous phase ended as those of `phase`.

        If `tokens`, the number of tokens that the phase computed, is given, tokens per second are recorded
        too.
        """
        now = time.monotonic()
        seconds, self.phase_started = now - self.phase_started, now
        self.figures[f"seconds_{phase}"] = seconds
        if tokens:
            self.figures[f"tokens_per_second_{phase}"] = tokens / seconds


@dataclass(frozen=True)
class FitEnd:
    """Way in which the training of a stage ended: after its last step, early, or at its time budget."""

    # Why it stopped early, such as a collapse; "" otherwise.
    reason: str = ""
    # Updates that are done and updates in all, if the time budget ended it before the last update.
    progress: tuple[int, int] | None = None


def fit(
    state: TrainState,
    steps: int,
    train_step: Callable[[int, StepRecord], None],
    *,
    shown: Sequence[str],
    save_every: int | str = 1,
) -> FitEnd:
    """Run the steps that remain of `steps` steps, and return how training ended.

    `train_step` is called with the step's number, from 0, and its StepRecord. A step is not begun if it is
    expected to end after the stage's deadline; the state is saved then. After each step its metrics are
    written and the figures named in `shown` are sent to the progress display. The state is saved every
    `save_every` steps, or minutes if it is a text such as 20min, and after the last step. If a step raises
    Collapsed or NotFinite, training ends with older weights if `state.rolls_back` is true, and otherwise the
    error is raised. After SIGTERM the running step is finished, its state is saved, and Terminated is raised.
    """
    stage, saved_at = state.stage, time.monotonic()
    with sigterm_deferred() as sigterm_received:
        for step in range(state.start, steps):
            if _is_out_of_time(state):
                if step > state.start and state.saved.newest() != step:
                    state.saved.save(step)
                return FitEnd(progress=(step, steps))
            record, reason = StepRecord(), ""
            try:
                train_step(step, record)
            except (Collapsed, NotFinite) as error:
                if not state.rolls_back:
                    raise
                # This step shows that the weights of the previous update may be bad: load an older state.
                state.saved.load(before=max(1, step))
                reason = f"{error} in update {step + 1}; the last good weights were kept"
            state.metrics.write(step, record.figures | {"seconds": time.monotonic() - record.started})
            if reason:
                return FitEnd(reason)
            figures = {name: record.figures[name] for name in shown}
            stage.progress.update(stage.name, step + 1, steps, **figures)
            stopping = sigterm_received(state.world)
            if isinstance(save_every, int):
                is_due = (step + 1) % save_every == 0
            else:
                seconds = 60 * int(save_every.removesuffix("min"))
                is_due = _on_any_rank(state, time.monotonic() - saved_at >= seconds)
            if stopping or is_due or step + 1 == steps:
                state.saved.save(step + 1)
                saved_at = time.monotonic()
            if stopping:
                raise Terminated(
                    f"{stage.name}: ended by SIGTERM after update {step + 1} of {steps}, whose state is "
                    "saved; the same command continues"
                )
    return FitEnd()


def _is_out_of_time(state: TrainState) -> bool:
    """Return whether the next step is expected to end after the deadline; every rank gets the same answer."""
    if state.stage.deadline is None:
        return False
    expected = max((record["seconds"] or 0.0 for record in state.metrics.records[-EXPECTED_FROM:]), default=0)
    return _on_any_rank(state, time.time() + expected > state.stage.deadline)


def _on_any_rank(state: TrainState, condition: bool) -> bool:
    """Return whether the condition holds on any rank; every rank must call this."""
    return bool(state.world.sum(torch.tensor(float(condition))) > 0)


def finish(
    state: TrainState,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    started: float,
    figures: Figures,
    rewards: tuple[float | None, float | None] = (None, None),
    end: FitEnd,
    stopped: str = "",
    extra: Mapping[str, dict[str, Tensor]] = MappingProxyType({}),
) -> StageResult:
    """Write the checkpoint of `model` and then stage.json; every rank calls this and gets the result.

    `end` is what `fit` returned, and `stopped` a remark on a stage that ran to its end. If the deadline ended
    the stage, its weights so far and unfinished.json are written instead. `started` is the time.monotonic()
    at which this process began the stage. The seconds of steps that earlier processes ran are added to the
    result. `rewards` are the mean rewards before and after training. `extra` has the tensors of additional
    checkpoint files, by file name. `figures` must not contain times, because they are part of the
    checkpoint's manifest, which must be the same after a resume.
    """
    stage = state.stage
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}
    folder = f"{CHECKPOINT}-{end.progress[0]:04d}" if end.progress else CHECKPOINT
    file = stage.out / (UNFINISHED if end.progress else RESULT)
    manifest = save_checkpoint(
        stage.out / folder,
        model,
        tokenizer,
        stage=stage.name,
        parent=verify_checkpoint(stage.actor).digest,
        dataset=dataset_version(stage.dataset / TASKS),
        code=stage.code,
        params=stage.params.model_dump(mode="json", exclude={"home"}),
        figures=figures,
        extra=extra,
        writes=state.world.rank == 0,
    )
    if manifest is not None:
        earlier_seconds = sum(record["seconds"] or 0.0 for record in state.metrics.records[: state.start])
        result = StageResult(
            name=stage.name,
            checkpoint=folder,
            digest=manifest.digest,
            reward_before=rewards[0],
            reward_after=rewards[1],
            seconds=earlier_seconds + time.monotonic() - started,
            figures=figures,
            stopped=end.reason or stopped,
            progress=end.progress,
        )
        write_json(file, result.model_dump())
    state.world.barrier()
    return StageResult.model_validate(read_json(file))
