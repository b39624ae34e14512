"""The simulated loop lasts as long as the real one, in which only tools, judges and training are waits."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_fixtures import NoPool, params, tiny_policy, tiny_tokenizer

from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory
from components.core.task import KernelTask
from components.judge.verdict import Verdict
from components.planning.rollout_simulator import Load, Samplers, Work, draw, simulate
from components.policy.row_cache import RowCache
from components.policy.transformers_sampler import TransformersSampler, _Sequence
from components.training.trajectory_queue import TrajectoryQueue

COUNT, STEPS, JUDGES, IN_FLIGHT = 8, 3, 1, 5
TRAIN_SECONDS, TOKEN_SECONDS = 0.6, 0.035
LOAD = Load(
    trajectories=COUNT,
    turns=2,
    turns_spread=0.6,
    max_turns=4,
    tokens=6,
    tokens_spread=0.4,
    max_tokens=12,
    context=10**6,
    observation_tokens=0,
    judged_share=0.4,
    judge_seconds=0.12,
    judge_spread=0.5,
    tool_seconds=0.2,
)


class Paced(TransformersSampler):
    """A sampler whose forward passes take at least TOKEN_SECONDS, as on a GPU that reads large weights."""

    passes, seconds = 0, 0.0

    def _evaluate_prompt(self, sequence: _Sequence, cache: RowCache, row: int) -> None:
        started = time.monotonic()
        super()._evaluate_prompt(sequence, cache, row)
        self.seconds += time.monotonic() - started

    def _step(self, running: Sequence[_Sequence], cache: RowCache) -> dict[int, str]:
        started = time.monotonic()
        ends = super()._step(running, cache)
        time.sleep(max(0.0, started + TOKEN_SECONDS - time.monotonic()))
        self.passes, self.seconds = self.passes + 1, self.seconds + time.monotonic() - started
        return ends


class Loop:
    """The real loop, which does the turns of `planned` and measures them."""

    def __init__(self, planned: Work):
        self.planned = planned
        self.measured = replace(
            planned, tool_seconds=planned.tool_seconds.copy(), judge_seconds=planned.judge_seconds.copy()
        )
        self.sampler = Paced(tiny_policy(), tiny_tokenizer(), batch=16, device="cpu", version="0+0")
        self.sampler.stop = ()  # A turn ends at the limit of its tokens.
        self.judges = ThreadPoolExecutor(JUDGES)
        self.trained: list[float] = []

    def request(self, wave: int) -> RolloutRequest:
        tasks = [KernelTask(code=f"# {wave}, {index}") for index in range(COUNT)]
        return RolloutRequest(tasks, params(), NoPool(), str(wave), 0, 4, 12, 1.0)

    def judge(self, row: int, turn: int) -> None:
        started = time.monotonic()
        time.sleep(self.planned.judge_seconds[row, turn])
        self.measured.judge_seconds[row, turn] = time.monotonic() - started

    async def run(self, request: RolloutRequest, index: int) -> Trajectory:
        row, version = int(request.epoch) * COUNT + index, self.sampler.version
        for turn in range(self.planned.turns[row]):
            await self.sampler.complete(
                [1, 5, 6],
                max_new_tokens=int(self.planned.tokens[row, turn]),
                temperature=1.0,
                seed=row,
                session=request.session(index),
            )
            started = time.monotonic()
            await asyncio.sleep(self.planned.tool_seconds[row, turn])
            self.measured.tool_seconds[row, turn] = time.monotonic() - started
            if self.planned.judge_seconds[row, turn]:
                await asyncio.get_running_loop().run_in_executor(self.judges, self.judge, row, turn)
        verdict, task = Verdict(status="correct", milestone=1), request.tasks[index]
        return Trajectory(task.task_id, (1, 5), (0, 1), (0, -1), (), (verdict,), 1.0, "stop", version)

    def seconds(self, out: Path, staleness: int) -> float:
        """Return the seconds of all steps."""
        queue = TrajectoryQueue(
            out,
            self.request,
            self.run,
            lambda: IN_FLIGHT,
            pool=NoPool(),
            staleness=staleness,
            group=1,
            on_finished=lambda finished: None,
        )
        complete: list[float] = []
        began = time.monotonic()
        for step in range(STEPS):
            self.sampler.version = f"0+{step}"
            queue.begin(step, COUNT, STEPS)
            folder = out / "trajectories" / f"step-{step:04d}"
            queue.take(folder, COUNT, lambda trajectories: complete.append(time.monotonic()))
            time.sleep(TRAIN_SECONDS)
            self.trained.append(time.monotonic() - complete[-1])
        seconds = time.monotonic() - began
        queue.close(is_complete=True)
        return seconds

    def simulated(self, staleness: int, judges: int = JUDGES, in_flight: int = IN_FLIGHT) -> float:
        """Return the seconds of all steps, as simulated from what was measured."""
        rate = self.sampler.passes / self.sampler.seconds
        samplers = Samplers(sequence_rate=rate, total_rate=np.inf, in_flight=in_flight)
        found = simulate(
            self.measured,
            samplers,
            judges,
            steps=STEPS,
            staleness=staleness,
            train_seconds=sum(self.trained) / STEPS,
        )
        return float(found.trained[-1])


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_simulated_steps_last_as_long_as_the_real_ones(staleness: int, tmp_path: Path) -> None:
    planned = draw(LOAD, 3, STEPS)
    loop = Loop(replace(planned, tokens=np.rint(planned.tokens)))
    real = loop.seconds(tmp_path, staleness)
    assert loop.simulated(staleness) == pytest.approx(real, rel=0.15)
    # What the comparison sees: that there is one judge, and that few trajectories are in flight.
    assert loop.simulated(staleness, judges=COUNT, in_flight=3 * COUNT) < 0.85 * real
