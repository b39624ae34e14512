"""Training loop of all stages: resume a stage from its newest state, run its steps, and write its result.

A stage builds its engines, calls `resume` on them, then `fit` with a function that trains one step, and then
`finish`. What a step computes depends only on the state and on the step's number, so a resumed stage ends
with bitwise the same weights as one that was never interrupted.

A state holds the parameters, optimizer states and random state of the stage's engines after a step. It is
written to a temporary folder that is renamed when it is complete, so a killed process leaves the previous
state intact. The folder's name contains precision, ZeRO stage and number of ranks, which are its layout.
DeepSpeed cannot load shards of another layout: a stage that resumes with another layout repeats its training
on its stored trajectories and does not sample them again.
"""

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.core.errors import StageFailed
from components.core.files import discard, read_json, sync_tree, write_json
from components.core.task import dataset_version
from components.policy.checkpoint import save_checkpoint, verify_checkpoint
from components.training.engine import DeepSpeedEngine, NotFinite
from components.training.launcher import TERMINATED
from components.training.metrics import Collapsed, Figures, MetricsFile
from components.training.ranks import World
from components.training.stage import CHECKPOINT, RESULT, SAMPLING, TASKS, UNFINISHED, Stage, StageResult

# Number of states kept on disk. It is 2 because the newest weights may turn out to be collapsed in the next
# step, which then needs older ones.
KEPT_STATES = 2
# The next step is expected to take as long as the longest of this number of newest steps.
EXPECTED_FROM = 3


@dataclass(frozen=True)
class StateStore:
    """Saved states of a stage's engines in the stage's folder; every rank must call `save` and `load`.

    A state has the parameters, optimizer states and random state of the engines after a step. The keys of
    `engines` are "actor", "critic" or both. `world` has the number of ranks, and `kept` is the number of
    states that `save` leaves on disk. Only states of the present layout are loaded, which is the precision,
    the ZeRO stage and the number of ranks.
    """

    stage: Stage
    engines: Mapping[str, DeepSpeedEngine]
    world: World
    kept: int

    @property
    def layout(self) -> str:
        settings = self.stage.params.engine
        return f"{settings.dtype}-zero{settings.zero_stage}-world{self.world.size}"

    def complete(self) -> list[tuple[int, Path]]:
        """Return (finished steps, folder) of every complete state of the present layout, oldest first.

        A state has the weights and optimizer states after a step, and its layout is the precision, the ZeRO
        stage and the number of ranks.
        """
        return sorted(
            (int(folder.name.split("-")[1]), folder)
            for folder in (self.stage.out / "state").glob(f"step-*-{self.layout}")
        )

    def save(self, steps: int) -> None:
        """Save weights, optimizer states and random state of the engines as the state after `steps` steps.

        Every rank must call this. If there are then more than `kept` states of the present layout (precision,
        ZeRO stage and number of ranks), the oldest ones are deleted. States of other layouts after at most
        `steps` steps are deleted too. The states of the stages `stage.earlier` are deleted, because their
        checkpoints are all that this stage needs.
        """
        folder = self.stage.out / "state" / f"step-{steps:04d}-{self.layout}"
        temporary = folder.with_name(f".{folder.name}.writing")
        if self.world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.world.barrier()
        for name, engine in self.engines.items():
            engine.save(temporary / name)
        self.world.barrier()
        if self.world.rank == 0:
            sync_tree(temporary)
            discard(folder)
            temporary.rename(folder)
            kept = {path for _, path in self.complete()[-self.kept :]}
            # States of other numbers of ranks are not read any more either.
            for old in folder.parent.glob("step-*"):
                if old not in kept and int(old.name.split("-")[1]) <= steps:
                    discard(old)
            for earlier in self.stage.earlier:
                discard(earlier / "state")
        self.world.barrier()

    def load(self, *, before: float = float("inf")) -> int:
        """Load the newest state that was saved after fewer than `before` steps; return its number of steps.

        A state has the weights and optimizer states after a step. Every rank must call this. Only states with
        the present precision, ZeRO stage and number of ranks are considered. Returns 0 and changes nothing if
        there is no such state.
        """
        states = [state for state in self.complete() if state[0] < before]
        self.world.barrier()
        if not states:
            return 0
        steps, folder = states[-1]
        for name, engine in self.engines.items():
            engine.load(folder / name)
        return steps


@dataclass(frozen=True)
class TrainState(StateStore):
    """A stage in training, with its stored states, from which it can continue, and its metrics.

    `start` is the number of steps that were done when this process began. `rolls_back` is whether the stage
    ends with earlier weights, instead of failing, when its policy has collapsed or a loss or gradient is not
    finite.
    """

    start: int
    metrics: MetricsFile
    rolls_back: bool


def resume(
    stage: Stage,
    engines: Mapping[str, DeepSpeedEngine],
    *,
    kept_states: int = KEPT_STATES,
    rolls_back: bool = False,
) -> TrainState:
    """Load the newest state in the stage's folder into the engines, and return the stage's TrainState.

    A state has the weights and optimizer states after a step. If there is no state, training starts at step
    0. The keys of `engines`, "actor" and "critic", name their folders in a state. At most `kept_states`
    states are kept on disk. With `rolls_back`, the state before the first step is saved too, so that a stage
    whose policy collapses in its first steps can go back to that state.
    """
    world = next(iter(engines.values())).world
    store = StateStore(stage, engines, world, kept_states)
    start = store.load()
    if rolls_back and not store.complete():
        store.save(0)
    return TrainState(
        **vars(store),
        start=start,
        metrics=MetricsFile(stage.out, start=start, writes=world.rank == 0),
        rolls_back=rolls_back,
    )


class Terminated(StageFailed):
    """Error raised when a stage has saved its state and ends because of SIGTERM.

    The message is one sentence.
    """

    exit_code = TERMINATED


@contextmanager
def sigterm_deferred() -> Iterator[list[int]]:
    """Return a context in which SIGTERM only sets a flag, so that the running step can end and be saved.

    The flag is the yielded list, which is empty until this rank receives the signal. Python handles signals
    only in the main thread; in any other thread the context changes nothing.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number)) if is_main else None
    try:
        yield received
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


@dataclass
class StepRecord:
    """Metrics that a running step has collected so far, with times and throughputs of its phases.

    A phase is a part of the step, such as sampling or the update of the actor. `started` and `phase_started`
    are the time.monotonic() at which the step and its present phase began.
    """

    figures: Figures = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    phase_started: float = field(default_factory=time.monotonic)

    def end_phase(self, phase: str, tokens: int = 0) -> None:
        """Record the seconds since the previous phase of the step ended as the figure seconds_`phase`.

        If there was none, they are counted from the step's begin. If `tokens`, the number of tokens that the
        phase computed, is not 0, tokens_per_second_`phase` is recorded too.
        """
        now = time.monotonic()
        seconds, self.phase_started = now - self.phase_started, now
        self.figures[f"seconds_{phase}"] = seconds
        if tokens:
            self.figures[f"tokens_per_second_{phase}"] = tokens / seconds


@dataclass(frozen=True)
class FitEnd:
    """Way in which the training of a stage ended: after its last step, early, or at its time budget.

    `reason` is a clause that says why training ended early, because the policy collapsed or a loss or
    gradient was not finite, such as "entropy is not a number in update 4; the last good weights were kept",
    and "" otherwise. `progress` has the number of steps that are done and of steps in all if the time budget
    ended the training before the last step, and is None otherwise.
    """

    reason: str = ""
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
    Collapsed or NotFinite and `state.rolls_back` is true, training ends with the newest saved weights from
    before the update of the previous step; if it is false, the error is raised. After SIGTERM the running
    step is finished, its state is saved, and Terminated is raised.
    """
    stage, saved_at = state.stage, time.monotonic()
    with sigterm_deferred() as received:
        for step in range(state.start, steps):
            if _is_out_of_time(state):
                if step > state.start and step not in dict(state.complete()):
                    state.save(step)
                return FitEnd(progress=(step, steps))
            record, reason = StepRecord(), ""
            try:
                train_step(step, record)
            except (Collapsed, NotFinite) as error:
                if not state.rolls_back:
                    raise
                # This step shows that the weights of the previous update may be bad: load an older state.
                state.load(before=max(1, step))
                reason = f"{error} in update {step + 1}; the last good weights were kept"
            state.metrics.write(step, record.figures | {"seconds": time.monotonic() - record.started})
            if reason:
                return FitEnd(reason)
            stage.progress.update(
                stage.name, step + 1, steps, **{name: record.figures[name] for name in shown}
            )
            stopping = state.world.any(bool(received))
            if isinstance(save_every, int):
                is_due = (step + 1) % save_every == 0
            else:
                minutes = (time.monotonic() - saved_at) / 60
                is_due = state.world.any(minutes >= int(save_every.removesuffix("min")))
            if stopping or is_due or step + 1 == steps:
                state.save(step + 1)
                saved_at = time.monotonic()
            if stopping:
                raise Terminated(
                    f"{stage.name}: ended by SIGTERM after update {step + 1} of {steps}, whose state is "
                    "saved; the same command continues"
                )
    return FitEnd()


def _is_out_of_time(state: TrainState) -> bool:
    """Return whether the next step is expected to end after the stage's deadline; False without a deadline.

    The step is expected to take as long as the longest of the last EXPECTED_FROM steps. Every rank must call
    this, and gets the same answer.
    """
    if state.stage.deadline is None:
        return False
    expected = max((record["seconds"] or 0.0 for record in state.metrics.records[-EXPECTED_FROM:]), default=0)
    return state.world.any(time.time() + expected > state.stage.deadline)


def finish(
    state: TrainState,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    started: float,
    figures: Figures,
    rewards: tuple[float | None, float | None] = (None, None),
    end: FitEnd,
    remark: str = "",
    extra: Mapping[str, dict[str, Tensor]] = MappingProxyType({}),
) -> StageResult:
    """Write the checkpoint of `model` and then stage.json; every rank calls this and gets the result.

    `end` is what `fit` returned, and `remark` is a text to be shown beside a stage that ran to its end, or
    "". If the time budget ended the stage, its weights so far and unfinished.json are written instead, and
    trajectories that no step has taken are kept for the next run. `started` is the time.monotonic() at which
    this process began the stage. The seconds of steps that earlier processes ran are added to the result.
    `rewards` are the mean rewards before and after training, None for a stage that samples nothing. `extra`
    has the tensors of additional checkpoint files, by file name. `figures` must not contain times, because
    they are part of the checkpoint's manifest, which must be the same after a resume.
    """
    stage = state.stage
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}
    if state.world.rank == 0 and not end.progress:
        discard(stage.out / SAMPLING)
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
            stopped=end.reason or remark,
            progress=end.progress,
        )
        write_json(file, result.model_dump())
    state.world.barrier()
    return StageResult.model_validate(read_json(file))
