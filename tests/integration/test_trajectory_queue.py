"""Sampling while the policy is trained: what a step takes, what is dropped, and what the figures say."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from training_fixtures import GOOD, NoPool, episode, params, stage

from components.agent.episode import RolloutRequest
from components.agent.rewards import reward_of
from components.agent.trajectory import Trajectory, load_trajectories, save_trajectories, updates_of
from components.core import files
from components.core.errors import InfrastructureError, StageFailed, UserError, error_chain
from components.core.files import digest_file
from components.core.task import KernelTask
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.verdict import Admission, Status, Verdict
from components.training.run_stage import run_stage
from components.training.trajectory_queue import TrajectoryQueue

STALE = (
    "warmup.staleness=1",
    "warmup.steps=10",
    "warmup.learning_rate=0.01",
    "warmup.critic_learning_rate=0.01",
    "warmup.critic_warmup_steps=1",
    # With these rates the weights of two steps differ much, and chance decides how many tokens are of which.
    "warmup.min_effective_share=0",
)


def test_a_stage_that_samples_ahead_learns_and_no_token_is_too_old(tmp_path: Path) -> None:
    made = stage(tmp_path, "warmup", *STALE)
    result = run_stage(made, episode)
    assert result.stopped == ""
    assert result.reward_before is not None and result.reward_after is not None
    assert result.reward_after > result.reward_before + 0.5
    records = [json.loads(line) for line in (made.out / "metrics.jsonl").read_text().splitlines()]
    assert [record["age_max"] for record in records[1:]] != [0] * 9
    assert all(0 <= record["age"] <= record["age_max"] <= 1 for record in records)
    assert all(record["idle_trainer"] >= 0 and record["dropped_for_age"] < 0.5 for record in records)
    for step in range(10):
        for trajectory in load_trajectories(made.out / "trajectories" / f"step-{step:04d}"):
            assert sum(count for _, count in trajectory.versions) == sum(trajectory.action_mask)
            assert all(step - 1 <= updates_of(version) <= step for version, _ in trajectory.versions)


class Line:
    """A queue of four attempts a wave, whose trajectories end when the test says so."""

    def __init__(self, out: Path, staleness: int = 1, group: int = 1):
        self.version = "0123+0"
        self.begun: list[str] = []
        self.held: set[str] = set()
        self.queue = TrajectoryQueue(
            out,
            self.request,
            self.run,
            lambda: 99,
            pool=NoPool(),
            staleness=staleness,
            group=group,
        )

    def request(self, wave: int) -> RolloutRequest:
        tasks = [KernelTask(code=f"# {wave}, {index}") for index in range(4)]
        return RolloutRequest(
            tasks, params(), NoPool(), f"t/{wave}", 0, max_turns=1, max_new_tokens=1, temperature=1.0
        )

    async def run(self, request: RolloutRequest, index: int) -> Trajectory:
        name, version = request.session(index), self.version
        self.begun.append(name)
        while name in self.held:
            await asyncio.sleep(0.01)
        verdict = Verdict(status="correct", milestone=1)
        return Trajectory(
            request.tasks[index].task_id,
            (1, 5),
            (0, 1),
            (0.0, -1.0),
            (),
            (verdict,),
            1.0,
            "stop",
            version,
            versions=((version, 1),),
        )

    def step(self, step: int, out: Path, steps: int = 99) -> list[list[int]]:
        """Take four trajectories as a step, and return their wave and index."""
        self.version = f"0123+{step}"
        self.queue.begin(step, 4, steps)
        folder = out / "trajectories" / f"step-{step:04d}"
        self.queue.take(folder, 4, lambda finished: None, lambda: None)
        return sorted([int(part) for part in place.name.split("-")] for place in folder.iterdir())


def test_the_trainer_does_not_wait_for_a_slow_trajectory_and_one_that_is_too_old_is_dropped(
    tmp_path: Path,
) -> None:
    line = Line(tmp_path)
    line.held = {"t/0/1"}
    assert [0, 1] not in line.step(0, tmp_path)
    assert [0, 1] not in line.step(1, tmp_path)
    assert line.queue.dropped == 0
    assert [0, 1] not in line.step(2, tmp_path)
    assert line.queue.dropped == 1, "its first token is two steps old"
    assert len(line.begun) == len(set(line.begun))
    line.queue.close()


def test_a_trajectory_of_which_the_removal_was_killed_is_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path)
    trajectory = asyncio.run(line.run(line.request(0), 0))
    lost = dataclasses.replace(trajectory, verdicts=(Verdict(status="infrastructure", reason="lost"),))
    save_trajectories(tmp_path / "sampling" / "0000-00000", [lost])

    def kill(folder: Path) -> None:
        if folder.exists():
            (folder / "tokens.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(files, "remove_tree", kill)
        Line(tmp_path)
    again = Line(tmp_path, staleness=0)
    assert [0, 0] in again.step(0, tmp_path)
    again.queue.close()


def test_all_samples_of_a_task_are_taken_together(tmp_path: Path) -> None:
    line = Line(tmp_path, group=2)
    line.held = {"t/0/1"}
    taken = line.step(0, tmp_path)
    assert not {(0, 0), (0, 1)} & {(wave, index) for wave, index in taken}
    assert [(w, i // 2) for w, i in taken[::2]] == [(w, i // 2) for w, i in taken[1::2]]
    line.held = set()
    while (0, 1) not in line.queue.finished:
        time.sleep(0.01)
    assert line.step(1, tmp_path)[:2] == [[0, 0], [0, 1]]
    line.queue.close()


def test_a_group_of_which_an_earlier_process_took_a_part_is_left_out(tmp_path: Path) -> None:
    """As if warmup.rollouts.samples had been 2, and is 4 in the process that continues the stage."""
    (tmp_path / "trajectories" / "step-0000" / "0000-00000").mkdir(parents=True)
    (tmp_path / "trajectories" / "step-0000" / "0000-00001").mkdir()
    line = Line(tmp_path, staleness=0, group=4)
    line.queue.begin(1, 4, 99)

    def give_up() -> None:
        raise TimeoutError("the queue waits for a group that cannot be completed")

    line.queue.take(tmp_path / "trajectories" / "step-0001", 4, lambda finished: None, give_up)
    line.queue.close()
    assert line.begun == [f"t/1/{index}" for index in range(4)]


def test_nothing_is_sampled_ahead_without_staleness(tmp_path: Path) -> None:
    line = Line(tmp_path, staleness=0)
    for step in range(3):
        assert line.step(step, tmp_path) == [[step, index] for index in range(4)]
        assert len(line.begun) == 4 * (step + 1)
    line.queue.close()


def test_no_more_is_sampled_than_the_steps_take(tmp_path: Path) -> None:
    line = Line(tmp_path, staleness=2)
    taken = [attempt for step in range(3) for attempt in line.step(step, tmp_path, steps=3)]
    assert len(line.begun) == 12 and sorted(taken) == [[w, i] for w in range(3) for i in range(4)]
    line.queue.close()


@pytest.mark.timeout(60)
def test_the_last_step_samples_again_what_was_stored_for_another_choice_of_tasks(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.held = {line.request(0).session(3)}
    line.queue.begin(0, 4, 1)
    while len(list(line.queue.folder.glob("[0-9]*"))) < 3:
        time.sleep(0.01)
    line.queue.close()

    class Others(Line):
        def request(self, wave: int) -> RolloutRequest:
            tasks = [KernelTask(code=f"another = {index}") for index in range(4)]
            return dataclasses.replace(super().request(wave), tasks=tasks)

    others = Others(tmp_path)
    assert others.step(0, tmp_path, steps=1) == [[0, index] for index in range(4)]
    assert len(others.begun) == 4
    others.queue.close()


@pytest.mark.timeout(60)
def test_a_trajectory_that_is_cancelled_by_its_judge_ends_the_step_instead_of_being_waited_for(
    tmp_path: Path,
) -> None:
    class Cancelled(Line):
        async def run(self, request: RolloutRequest, index: int) -> Trajectory:
            if index == 2:
                # As an episode whose waiting job the judge pool has cancelled.
                await asyncio.to_thread(concurrent.futures.Future.result, cancelled)
            return await super().run(request, index)

    cancelled: concurrent.futures.Future[None] = concurrent.futures.Future()
    cancelled.cancel()
    line = Cancelled(tmp_path, staleness=0)
    with pytest.raises(StageFailed, match="a trajectory was cancelled before its end; run again"):
        line.step(0, tmp_path)
    line.queue.close()
    again = Line(tmp_path, staleness=0)
    assert again.step(0, tmp_path) == [[0, index] for index in range(4)]
    assert "t/0/2" in again.begun


def test_trajectories_that_a_killed_step_was_moving_are_taken_by_the_next_one(tmp_path: Path) -> None:
    first = Line(tmp_path, staleness=0)
    first.step(0, tmp_path)
    first.queue.close()
    step = tmp_path / "trajectories" / "step-0000"
    step.rename(step.with_name(".step-0000"))
    (step.with_name(".step-0000") / "0000-00001").rename(tmp_path / "sampling" / "0000-00001")
    again = Line(tmp_path, staleness=0)
    assert again.step(0, tmp_path) == [[0, index] for index in range(4)] and again.begun == []
    assert [place.name for place in (tmp_path / "trajectories").iterdir()] == ["step-0000"]


class Losing(Line):
    """A queue on whose attempts with an index in `reasons` the judge fails, for the reason there."""

    reasons: Mapping[int, str] = MappingProxyType({})

    async def run(self, request: RolloutRequest, index: int) -> Trajectory:
        trajectory = await super().run(request, index)
        if index not in self.reasons:
            return trajectory
        verdict = Verdict(status="infrastructure", reason=self.reasons[index], log="it takes 9.0 GB")
        return dataclasses.replace(trajectory, verdicts=(verdict,), reward=None)


@pytest.mark.parametrize(
    ("reasons", "may_retry"),
    [({1: "too_large", 3: "too_large"}, False), ({0: "judge", 1: "too_large"}, True)],
)
def test_a_step_that_loses_more_than_a_quarter_to_the_judge_is_not_trained_on_and_continues(
    tmp_path: Path, reasons: dict[int, str], may_retry: bool
) -> None:
    line = Losing(tmp_path, staleness=0)
    line.step(0, tmp_path)
    line.reasons = reasons
    with pytest.raises(UserError) as stop:
        line.step(1, tmp_path)
    line.queue.close()
    for reason, count in Counter(reasons.values()).items():
        assert f"{count} {reason}: it takes 9.0 GB" in str(stop.value)
    assert "step 2: the judge failed on 2 of" in str(stop.value)
    assert any(isinstance(seen, InfrastructureError) for seen in error_chain(stop.value)) == may_retry
    assert [place.name for place in (tmp_path / "trajectories").iterdir()] == ["step-0000"]
    again = Losing(tmp_path, staleness=0)
    assert again.step(1, tmp_path) == [[1, index] for index in range(4)]
    assert {f"t/1/{index}" for index in reasons} <= set(again.begun)
    again.queue.close()


def test_a_step_that_loses_a_quarter_to_the_judge_goes_on(tmp_path: Path) -> None:
    line = Losing(tmp_path, staleness=0)
    line.reasons = {2: "judge"}
    assert line.step(0, tmp_path) == [[0, index] for index in range(4)]
    line.queue.close()


class Mortal:
    """A judge that gives `lives` verdicts and then fails."""

    def __init__(self, lives: int):
        self.lives = lives

    def admit(self, *_: Any, **__: Any) -> Admission:
        return Admission(True, "", {})

    def verdict(self, task: KernelTask, files: dict[str, str], *, compare_compile: bool | None) -> Verdict:
        self.lives -= 1
        if self.lives < 0:
            raise InfrastructureError("the zygote is gone")
        tokens = files["kernels/forward.cpp"]
        status: Status = "correct" if str(GOOD) in tokens else "wrong_output"
        return Verdict(status=status, milestone=1 if status == "correct" else -1)

    def close(self) -> None: ...


def test_a_judge_that_dies_in_the_middle_of_a_step_ends_the_stage_and_the_next_one_continues_it(
    tmp_path: Path,
) -> None:
    sampled: list[str] = []

    async def judged(request: RolloutRequest, index: int, *rest: Any) -> Trajectory:
        sampled.append(request.session(index))
        trajectory = await episode(request, index, *rest)
        job = Job(request.tasks[index], Candidate.of(trajectory.files), request.epoch)
        trajectory = dataclasses.replace(
            trajectory, verdicts=(await asyncio.to_thread(request.pool.submit(job).result),)
        )
        return dataclasses.replace(trajectory, reward=reward_of(trajectory, request.reward))

    def trained(folder: Path, lives: int) -> str:
        class Pool(LocalPool):
            def start(self) -> Any:
                return Mortal(lives)

        made = stage(folder, "warmup", "warmup.steps=3", "warmup.learning_rate=0.01")
        with contextlib.closing(Pool(made.params, folder / "verdicts")) as pool:
            result = run_stage(dataclasses.replace(made, pool=pool), judged)
        assert result.stopped == ""
        return digest_file(made.out / "checkpoint" / "model.safetensors")

    whole = trained(tmp_path / "whole", 10_000)
    sampled.clear()
    with pytest.raises(
        UserError, match=r"step 2: the judge failed on .*judge: the zygote is gone.*continues"
    ):
        trained(tmp_path / "killed", 40)
    assert not (tmp_path / "killed/warmup/trajectories/step-0001").exists()
    sampled.clear()
    assert trained(tmp_path / "killed", 10_000) == whole, "as if the judge had lived"
    assert not [name for name in sampled if name.startswith("warmup/0/")]
    assert len(sampled) < 64, "what the judge judged before it died is not sampled again"


def test_an_error_of_one_trajectory_is_raised_by_the_step_and_keeps_the_finished_ones(tmp_path: Path) -> None:
    made = stage(tmp_path, "warmup", "warmup.steps=1")

    def finished() -> int:
        return len(list((made.out / "sampling").glob("[0-9]*")))

    async def failing(request: RolloutRequest, index: int, *rest: Any) -> Trajectory:
        if index == 31:
            while finished() < 31:
                await asyncio.sleep(0.01)
            raise UserError("sampler: gone.")
        return await episode(request, index, *rest)

    with pytest.raises(UserError, match="gone"):
        run_stage(made, failing)
    assert finished() == 31
    again: list[int] = []

    async def counting(request: RolloutRequest, index: int, *rest: Any) -> Trajectory:
        again.append(index)
        return await episode(request, index, *rest)

    assert run_stage(made, counting).stopped == "" and again == [31]


def test_sampling_ahead_with_a_sampler_that_sleeps_meanwhile_is_refused(tmp_path: Path) -> None:
    made = stage(tmp_path, "agentic", "agentic.staleness=1", "policy.sleep=true")
    with pytest.raises(UserError, match=r"agentic\.staleness: 1 samples while the policy is trained"):
        run_stage(dataclasses.replace(made, critic=made.actor), episode)


def test_sampling_that_has_just_begun_is_ended_too(tmp_path: Path) -> None:
    for number in range(20):
        line = Line(tmp_path / str(number))
        line.held = {f"t/0/{index}" for index in range(4)}
        line.queue.begin(0, 4, 99)
        line.queue.close()
        assert not line.queue.thread.is_alive()
