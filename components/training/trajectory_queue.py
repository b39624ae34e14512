"""The trajectories between sampling and training: a thread samples them, and the trainer takes them.

An attempt is the sampling of one trajectory. Attempts are numbered by wave and index; a wave is the list of
attempts for which one choice of tasks was made. A trajectory is a folder `sampling/WWWW-IIIII` of the stage
as soon as it ends. The trainer takes the oldest complete ones of which every token was sampled with weights
that are at most `staleness` steps old, and older ones are dropped. The folders of the trajectories that a
step takes are moved into the folder of the step, which appears atomically. So each trajectory is written
once, and is trained on by one step or by none, also if the process is killed at any moment.

The number of attempts that run or wait to be taken is at most (staleness + 1) times the trajectories of a
step, as in AReaL (arXiv 2505.24298, section 5.1), so a trajectory that is not slower than the others is never
too old. The number is also at most that of the trajectories that the remaining steps take. With a staleness
of 0, each step samples its own wave with its own weights.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.agent.episode import MAX_LOST_SHARE, RolloutRequest, judge_failures
from components.agent.in_flight import BusyMeter, keep_in_flight
from components.agent.trajectory import Trajectory, load_trajectories, save_trajectories, updates_of
from components.core.errors import InfrastructureError, UserError
from components.core.files import discard, sync
from components.judge.pool.local_pool import TASK_FAULTS, JudgePool
from components.training.stage import SAMPLING

# Time without a complete trajectory after which the sampler is looked after, in seconds.
TEND_SECONDS = 2.0
# Wave and index of an attempt.
Attempt = tuple[int, int]


def is_trainable(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be trained on: the judge did not fail, and a token was sampled.

    The judge is what measures the trajectory's kernels; if it failed, the trajectory has no reward.
    """
    return trajectory.is_judged and any(trajectory.action_mask)


@dataclass(frozen=True)
class _Finished:
    """A trajectory that waits to be taken by a training step.

    `oldest` is the number of training steps of the oldest weights that sampled one of its tokens.
    `is_trainable` is whether the trajectory has a reward and sampled tokens. `failure` has the reason and the
    log of the failure if the judge, which measures kernels, failed on the trajectory, and is None otherwise.
    """

    task_id: str
    oldest: int
    is_trainable: bool
    failure: tuple[str, str] | None


@dataclass
class _Running:
    # Step of the last call of `begin` before the attempt began, and the asyncio task that samples it.
    begun: int
    task: asyncio.Task[Any] | None = None


class TrajectoryQueue:
    """Queue of trajectories that a thread samples and that training steps take.

    The thread samples from the first call of `begin` until `close` is called.
    """

    def __init__(
        self,
        out: Path,
        request_of: Callable[[int], RolloutRequest],
        run: Callable[[RolloutRequest, int], Coroutine[Any, Any, Trajectory]],
        capacity: Callable[[], int],
        *,
        pool: JudgePool,
        staleness: int,
        group: int,
    ):
        """Read the trajectories that an earlier process left in the folder `out` of the stage.

        An attempt is the sampling of one trajectory, and a wave is a list of attempts with one request.
        `request_of(wave)` makes the request of a wave, by its index, and `run(request, index)` samples a
        trajectory of it; at most `capacity()` run at a time. A trajectory is dropped when the oldest weights
        that sampled a token of it are more than `staleness` steps old. Each `group` consecutive attempts of a
        wave are taken together or not at all. The waiting jobs of `pool` are cancelled when the sampling ends
        early.
        """
        self.out, self.folder = out, out / SAMPLING
        self.request_of, self.run, self.capacity = request_of, run, capacity
        self.pool, self.staleness, self.group = pool, staleness, group
        self.condition = threading.Condition()
        self.step = self.budget = self.dropped = 0
        self.error: BaseException | None = None
        self.running: dict[Attempt, _Running] = {}
        self.finished: dict[Attempt, _Finished] = {}
        self.taken = {_attempt(place) for place in out.glob("trajectories/step-*/[0-9]*-[0-9]*")}
        # If `group` was another number, an earlier process may have taken a part of a group, which then can
        # never be complete.
        self.dropped_groups = {self._group(attempt) for attempt in self.taken}
        # All requests share this event and these two meters.
        self.stopped, self.sampling, self.judging = threading.Event(), BusyMeter(), BusyMeter()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.main: asyncio.Task[Any] | None = None
        # Set when the thread has set `loop` and `main`, or could not.
        self.serving = threading.Event()
        self.changed = asyncio.Event()
        self.thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._read_finished()
        self.attempts = self._attempts()

    def begin(self, step: int, count: int, steps: int) -> None:
        """Let sampling go on for step `step` of `steps` and, as far as `staleness` allows, for later ones.

        Steps are counted from 0, and each takes `count` trajectories. Drops the trajectories, finished or
        running, whose oldest weights are more than `staleness` steps older than those of `step`. With each of
        them, the others of its group are dropped: `group` trajectories that a step takes together or not at
        all. The weights of `step` must have been published to the sampler. Raises the error of a trajectory
        whose sampling failed.
        """
        with self.condition:
            self.step = step
            oldest = {attempt: one.oldest for attempt, one in self.finished.items()}
            oldest |= {attempt: one.begun for attempt, one in self.running.items()}
            self.dropped_groups |= {
                self._group(attempt) for attempt, updates in oldest.items() if step - updates > self.staleness
            }
            for attempt in [one for one in oldest if self._group(one) in self.dropped_groups]:
                self.dropped += 1
                if attempt in self.running:
                    task = self.running.pop(attempt).task
                    if task is not None:
                        self._call(task.cancel)
                else:
                    del self.finished[attempt]
                    discard(self._path(attempt))
            outstanding = len(self.finished) + len(self.running)
            self.budget = max(0, min(self.staleness + 1, steps - step) * count - outstanding)
        if self.error is not None:
            raise self.error
        if not self.thread.is_alive():
            self.thread.start()
        else:
            self._call(self.changed.set)

    def take(self, folder: Path, count: int, report: Callable[[int], None], tend: Callable[[], None]) -> None:
        """Wait until `count` trajectories are complete, and move the `count` oldest ones into `folder`.

        `folder` appears when all of them are in it. While this method waits, `report` is called with the
        number of trajectories that wait to be taken, and `tend` is called if none was completed for
        TEND_SECONDS. Raises the error of a trajectory whose sampling failed. Raises UserError, and moves
        nothing, as soon as the judge, which measures kernels, has failed on more than MAX_LOST_SHARE of the
        trajectories of the step, or if none of the `count` trajectories can be trained on (`is_trainable`).
        """
        with self.condition:
            while True:
                chosen = sorted(self._ready()[:count])
                self._check([self.finished[attempt] for attempt in chosen], count)
                if len(chosen) == count:
                    break
                if self.error is not None:
                    raise self.error
                if self.condition.wait(TEND_SECONDS):
                    report(len(self.finished))
                else:
                    tend()
            for attempt in chosen:
                del self.finished[attempt]
            self.taken |= set(chosen)
        moving = folder.with_name(f".{folder.name}")
        moving.mkdir(parents=True)
        for attempt in chosen:
            self._path(attempt).rename(moving / self._path(attempt).name)
        sync(moving)
        moving.rename(folder)
        sync(folder.parent)

    def _check(self, chosen: Sequence[_Finished], count: int) -> None:
        """Raise UserError if a step of `count` trajectories, of which `chosen` are complete, cannot be used.

        That is so if the judge, which measures kernels, failed on more than the share MAX_LOST_SHARE of the
        `count` trajectories, or if all are complete and none can be trained on. If it may help to run the
        stage again unchanged, the error has an InfrastructureError as its cause.
        """
        lost = [one.failure for one in chosen if one.failure is not None]
        if len(lost) > MAX_LOST_SHARE * count:
            said = judge_failures(lost)
            raise UserError(
                f"{self.out.name}: step {self.step + 1}: the judge failed on {len(lost)} of {len(chosen)} "
                f"trajectories ({said}), so nothing of the step was trained on; run cuda-agent doctor, and "
                "then the same command again, which continues from the last saved state."
            ) from (None if {reason for reason, _ in lost} <= set(TASK_FAULTS) else InfrastructureError(said))
        if len(chosen) == count and not any(one.is_trainable for one in chosen):
            raise UserError(
                f"{self.out.name}: step {self.step + 1}: no token was sampled in any trajectory, because the "
                "prompts fill the context window; raise policy.context."
            )

    def close(self) -> None:
        """End the sampling. Trajectories that no step has taken stay in the folder `sampling`."""
        if self.thread.is_alive():
            self.serving.wait()
            if self.main is not None:
                self._call(self.main.cancel)
            self.thread.join()

    def _call(self, function: Callable[[], object]) -> None:
        """Have the thread call `function`, unless its event loop has ended."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(function)

    def _group(self, attempt: Attempt) -> Attempt:
        return attempt[0], attempt[1] // self.group

    def _path(self, attempt: Attempt) -> Path:
        return self.folder / f"{attempt[0]:04d}-{attempt[1]:05d}"

    def _ready(self) -> list[Attempt]:
        """Return the finished trajectories that can be taken, beginning with those of the oldest weights.

        Each is a pair of the index of its wave and its index in the wave, which is a list of trajectories
        with one choice of tasks. A trajectory can be taken if its group is finished, which consists of
        `group` trajectories with consecutive indices of a wave.
        """
        groups: dict[Attempt, list[Attempt]] = {}
        for attempt in self.finished:
            groups.setdefault(self._group(attempt), []).append(attempt)
        complete = [members for members in groups.values() if len(members) == self.group]
        complete.sort(key=lambda members: (min(self.finished[one].oldest for one in members), min(members)))
        return [attempt for members in complete for attempt in members]

    def _read_finished(self) -> None:
        """Read the trajectories that an earlier process finished and no step has taken.

        Those in the folder of a step that was not completed are moved back to the folder `sampling`. Those
        that cannot be trained on (`is_trainable`) are removed, so that they are sampled again. Folders in
        `sampling` whose names begin with a dot are ignored, because they were not written completely.
        """
        for moving in self.out.glob("trajectories/.step-*"):
            for folder in moving.iterdir():
                folder.rename(self.folder / folder.name)
            moving.rmdir()
        for folder in sorted(self.folder.glob("[0-9]*")):
            (trajectory,) = load_trajectories(folder)
            if is_trainable(trajectory):
                self._add(_attempt(folder), trajectory)
            else:
                discard(folder)

    def _add(self, attempt: Attempt, trajectory: Trajectory) -> None:
        names = [name for name, _ in trajectory.versions] or [trajectory.policy_version]
        final = trajectory.final
        self.finished[attempt] = _Finished(
            trajectory.task_id,
            oldest=min(map(updates_of, names)),
            is_trainable=is_trainable(trajectory),
            failure=None if trajectory.is_judged else (final.reason or final.status, final.log),
        )

    def _attempts(self) -> Iterator[tuple[Attempt, RolloutRequest]]:
        """Yield the attempts that remain to be sampled, each with the request of its wave.

        An attempt is the sampling of one trajectory. A wave is a list of attempts for which one choice of
        tasks is made. An attempt is a pair of the number of its wave and its index in the wave, and attempts
        come in the order of these pairs. Those that are finished, taken or dropped are left out. The iterator
        never ends, because it makes the request of the next wave when it reaches it.
        """
        for wave in itertools.count():
            request = dataclasses.replace(
                self.request_of(wave), stopped=self.stopped, sampling=self.sampling, judging=self.judging
            )
            for index, task in enumerate(request.tasks):
                attempt = (wave, index)
                found = self.finished.get(attempt)
                if found is not None and found.task_id != task.task_id:
                    del self.finished[attempt]  # Another choice of tasks was made for this wave.
                    self.budget += 1
                    found = None
                is_open = found is None and attempt not in self.taken
                if is_open and self._group(attempt) not in self.dropped_groups:
                    yield attempt, request

    def _start(self) -> Coroutine[Any, Any, None] | None:
        """Return the coroutine that samples the next trajectory, or None if no more may be sampled yet.

        `begin` sets how many trajectories may still be sampled.
        """
        with self.condition:
            if self.budget <= 0:
                return None
            attempt, request = next(self.attempts)
            self.budget -= 1
            self.running[attempt] = _Running(self.step)
            return self._sample(attempt, request)

    async def _sample(self, attempt: Attempt, request: RolloutRequest) -> None:
        """Sample one trajectory and store it, unless `begin` drops it because its weights are too old.

        `attempt` has the wave, which is the list of trajectories of `request`, and the trajectory's index
        there.
        """
        with self.condition:
            if attempt not in self.running:
                return
            self.running[attempt].task = asyncio.current_task()
        try:
            trajectory = await self.run(request, attempt[1])
            await asyncio.to_thread(save_trajectories, self._path(attempt), [trajectory])
        except asyncio.CancelledError:
            with self.condition:
                if attempt in self.running:
                    raise
                return  # `begin` has dropped it.
        with self.condition:
            if self.running.pop(attempt, None) is None:  # It was dropped meanwhile.
                discard(self._path(attempt))
                return
            self._add(attempt, trajectory)
            self.condition.notify_all()

    def _serve(self) -> None:
        async def sample_all() -> None:
            self.loop, self.main = asyncio.get_running_loop(), asyncio.current_task()
            self.serving.set()
            try:
                await keep_in_flight(self._start, self.capacity, self.changed)
            except BaseException:
                self.stopped.set()
                self.pool.drop()
                raise

        try:
            asyncio.run(sample_all())
        except asyncio.CancelledError:
            return
        except BaseException as error:
            with self.condition:
                self.error = error
                self.condition.notify_all()
        finally:
            self.serving.set()


def _attempt(folder: Path) -> Attempt:
    """Return the wave and the index in the name of a trajectory's folder, such as (3, 12) for 0003-00012.

    A wave is a list of trajectories for which one choice of tasks was made; the index is that in the wave.
    """
    wave, index = folder.name.split("-")
    return int(wave), int(index)
