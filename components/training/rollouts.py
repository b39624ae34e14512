"""Get the trajectories of each training step from a sampler that has the newest weights.

This module chooses the tasks of the step, gives the sampler the weights, and stores the trajectories, so a
step that is repeated after a kill does not sample them again.
"""

import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from components.agent.episode import RolloutRequest
from components.agent.rewards import load_reward
from components.agent.trajectory import Trajectory, load_trajectories
from components.core import stage_params
from components.core.errors import StageFailed, UserError
from components.core.files import atomic_folder
from components.core.task import KernelTask
from components.judge.pool.measurable import check_tasks, left_out
from components.policy.adapter import add_adapter
from components.policy.checkpoint import (
    BUCKET_BYTES,
    load_model,
    load_tokenizer,
    verify_checkpoint,
    write_model,
)
from components.policy.sampler import Sampler
from components.policy.transformers_sampler import TransformersSampler
from components.policy.vllm.own_servers import OWN_SERVERS
from components.policy.vllm.sampler import VllmSampler, has_ended, open_vllm_sampler
from components.policy.weight_stream import weight_buckets
from components.training.engine import DTYPES, DeepSpeedEngine
from components.training.metrics import Figures, ages
from components.training.networks import load_policy
from components.training.ranks import join_world
from components.training.stage import TASK_CHECKS, TASKS, Stage, derived_seed
from components.training.trajectory_queue import TrajectoryQueue, is_trainable

# Type of functions such as `components.agent.episode.run_episode`, the agent loop. From a request, the
# index of a task in it, a sampler and the tokenizer, they return one trajectory of this task.
RunEpisode = Callable[
    [RolloutRequest, int, Sampler, PreTrainedTokenizerBase], Coroutine[Any, Any, Trajectory]
]


def choose_tasks(tasks: Sequence[KernelTask], count: int, *, seed: int, step: int) -> list[KernelTask]:
    """Return the `count` tasks to sample in the step with the number `step`, from 0.

    They are the next tasks in repeated passes over all `tasks`, so a task may occur twice. The order of a
    pass depends only on `seed`, the number of the pass and the number of tasks.
    """

    def order(number: int) -> list[int]:
        shuffled = list(range(len(tasks)))
        random.Random(derived_seed(seed, "pass", number)).shuffle(shuffled)
        return shuffled

    positions = [divmod(position, len(tasks)) for position in range(step * count, (step + 1) * count)]
    orders = {number: order(number) for number, _ in positions}
    return [tasks[orders[number][index]] for number, index in positions]


class TrainedPolicy:
    """The policy that a stage trains, with its tokenizer, its sampler and the trajectories that it samples.

    With the backend transformers, the sampler uses the trained weights themselves, and pauses while they are
    trained. Under ZeRO 3, which shards the weights, the sampler of rank 0 has a full copy of them instead.
    With vLLM servers, rank 0 sends the weights to the servers before every step. The other ranks have no
    sampler and only help to gather the weights.
    """

    def __init__(
        self,
        stage: Stage,
        rollouts: stage_params.Rollouts,
        run_episode: RunEpisode,
        choose: Callable[[Sequence[KernelTask], int], Sequence[KernelTask]],
        *,
        staleness: int = 0,
        group: int = 1,
    ):
        """Load the checkpoint `stage.actor` as the attribute `model`, and make the sampler of its weights.

        `rollouts` are the parameters of the sampling, and `run_episode` samples one trajectory. An attempt is
        the sampling of one trajectory. `choose(tasks, wave)` returns the tasks of a wave of attempts, one for
        each attempt, where `tasks` are those of the data set that the judge can measure, and `wave` is the
        number of the wave, from 0 (`trajectory_queue`). A trajectory is dropped once the oldest weights that
        sampled a token of it are more than `staleness` steps old. Each `group` consecutive attempts of a wave
        are trained on together or not at all. Raises UserError if too few tasks can be measured.
        """
        params = stage.params
        settings, device = params.engine, params.device
        self.digest = verify_checkpoint(stage.actor, device).digest
        self.stage, self.rollouts, self.choose = stage, rollouts, choose
        self.reward = load_reward(params.reward)
        self.world = join_world(device, settings)
        # The tasks that are sampled, and a clause on those that the judge cannot measure, or "".
        self.tasks, self.left_out = _measurable(stage) if self.world.rank == 0 else ([], "")
        self.tokenizer = load_tokenizer(stage.actor)
        self.model = load_policy(stage.actor, params)
        self.staleness = staleness
        self.sampler: TransformersSampler | VllmSampler | None = None
        self.queue: TrajectoryQueue | None = None
        self.is_paused = False
        # The time, and the seconds in which a completion and a verdict were waited for, when `sample` last
        # returned.
        self.read = (time.monotonic(), 0.0, 0.0)
        # The checkpoint of the newest weights, with which vLLM's transfer by disk is made.
        self.published = stage.out / "published"
        if self.world.rank > 0:
            return
        if params.policy.backend == "transformers":
            model = self.model
            if settings.zero_stage == 3:
                model = load_model(stage.actor, dtype=DTYPES[settings.dtype], device=device)
                add_adapter(model, params.policy.adapter)
            self.sampler = TransformersSampler(
                model, self.tokenizer, batch=params.policy.batch, device=device, version=self.digest
            )
        else:
            self.sampler = open_vllm_sampler(params, stage.actor, self.tokenizer, version=self.digest)
        sampler = self.sampler
        self.queue = TrajectoryQueue(
            stage.out,
            self._request,
            lambda request, index: run_episode(request, index, sampler, self.tokenizer),
            sampler.capacity,
            pool=stage.pool,
            staleness=staleness,
            group=group,
        )

    def _request(self, wave: int) -> RolloutRequest:
        """Return the request to sample a trajectory of each task that `choose` returns for wave `wave`.

        A wave is a list of trajectories to sample, for which one choice of tasks is made; waves are numbered
        from 0.
        """
        stage, rollouts = self.stage, self.rollouts
        return RolloutRequest(
            tasks=self.choose(self.tasks, wave),
            params=stage.params,
            pool=stage.pool,
            epoch=f"{stage.out.name}/{wave}",
            seed=derived_seed(stage.params.seed, stage.name, wave),
            max_turns=rollouts.max_turns,
            max_new_tokens=rollouts.max_new_tokens,
            temperature=rollouts.temperature,
            reward=self.reward,
        )

    def publish(self, engine: DeepSpeedEngine, updates: int) -> None:
        """Give the sampler the present weights of `engine`; every rank must call this.

        `updates` is the number of steps that the stage has trained so far. The weights get a name such as
        0123456789abcdef+3: the first digits of the digest of the checkpoint that the stage started from, and
        `updates`. Trajectories record the names of the weights that sampled them.
        """
        version = f"{self.digest[:16]}+{updates}"
        policy = self.stage.params.policy
        if policy.backend == "transformers":
            if engine.settings.zero_stage == 3:
                self._pause()
                self._copy_to_sampler(engine)
            if self.sampler is not None:
                self.sampler.version = version
            self._resume()
        else:
            if policy.weight_transfer == "disk":
                if self.world.rank == 0:
                    with atomic_folder(self.published) as temporary:
                        write_model(temporary, self.model)
                else:
                    self._help_to_gather()
            if isinstance(self.sampler, VllmSampler):
                self._push(self.sampler, version)
            else:
                self._help_to_gather()

    def _push(self, sampler: VllmSampler, version: str) -> None:
        """Send the present weights to the vLLM servers, and name them `version`.

        If all servers that this process has started have ended, the first one is waited for, because they
        are started again. If the last one ends during the push, all weights are sent again, unless other
        ranks would have to help to gather them.
        """
        while True:
            was_healthy = OWN_SERVERS.wait(any)
            try:
                sampler.push(weight_buckets(self.model, BUCKET_BYTES), version=version, folder=self.published)
                return
            except UserError as error:
                if not (was_healthy and has_ended(error)) or self._gathers():
                    raise

    def _gathers(self) -> bool:
        """Return whether the weights are sharded by ZeRO 3 among several ranks."""
        return self.world.size > 1 and self.stage.params.engine.zero_stage == 3

    def _restore(self) -> None:
        """Send the present weights again if all vLLM servers lost them by a restart.

        Does nothing with another sampler, or while a server can be used. Raises StageFailed if the weights
        are sharded by ZeRO 3 among several ranks, because the other ranks would have to help to gather them.
        """
        if isinstance(self.sampler, VllmSampler) and self.sampler.fleet.has_lost_weights():
            if self._gathers():
                raise StageFailed(
                    f"{self.stage.name}: the vLLM servers lost their weights by a restart, and several ranks "
                    "under engine.zero_stage 3 send them only between steps; run the same command again, "
                    "which continues from the last saved state."
                )
            self._push(self.sampler, self.sampler.version)

    def _help_to_gather(self) -> None:
        """Take part in gathering the sharded weights that rank 0 sends or writes.

        Every rank but rank 0 must call this while rank 0 sends or writes the weights; otherwise rank 0 waits.
        """
        for _ in weight_buckets(self.model, BUCKET_BYTES):
            pass

    def _copy_to_sampler(self, engine: DeepSpeedEngine) -> None:
        """Copy the weights that ZeRO 3 has sharded, one layer at a time, to the sampler's separate model.

        Only rank 0 has a sampler, but every rank must call this, because all are needed to gather a layer.
        """
        for name, module in self.model.named_modules():
            with engine.gathered(module, recurse=False):
                if isinstance(self.sampler, TransformersSampler):
                    copy = self.sampler.model.get_submodule(name)
                    for parameter, own in module.named_parameters(recurse=False):
                        copy.get_parameter(parameter).data.copy_(own.data)

    def _pause(self) -> None:
        """Pause the sampler if it is of the backend transformers, because its weights are about to change."""
        if isinstance(self.sampler, TransformersSampler) and not self.is_paused:
            self.sampler.pause()
            self.is_paused = True

    def _resume(self) -> None:
        if isinstance(self.sampler, TransformersSampler) and self.is_paused:
            self.is_paused = False
            self.sampler.resume()

    def sample(self, count: int, *, step: int, steps: int) -> tuple[list[Trajectory], Figures]:
        """Return the trajectories of step `step` of `steps`, with metrics; every rank must call this.

        Steps are counted from 0. If the step's trajectories are not on disk yet, rank 0 waits for `count` of
        them and stores them. Those that are not trainable (`is_trainable`), because the judge failed to
        measure their kernels or no token was sampled, are left out of the result. Raises UserError, and
        stores nothing, if no trajectory is trainable or if the judge failed on too many
        (`TrajectoryQueue.take`); the next run then samples the step again.

        The metrics are the number of trajectories that were left out because the judge failed (`dropped`),
        and the mean and the largest age, in steps of training, of the weights that sampled the tokens (`age`,
        `age_max`). If rank 0 waited, it also returns the seconds of this wait (`idle_trainer`) and the
        seconds in which the sampler and the judge were idle since the end of the wait before (`idle_sampler`,
        `idle_judge`). `dropped_for_age` is then the number of trajectories that were dropped for their age
        during this call, divided by this number plus `count`. With vLLM, rank 0 also returns metrics of the
        health and the load of the servers, in which events such as retries are counted since the last call. A
        sampler that uses the trained weights themselves computes nothing from the return until the next
        `publish`.
        """
        folder, figures = self.stage.out / "trajectories" / f"step-{step:04d}", Figures()
        if self.queue is not None and not folder.is_dir():
            stage, dropped, started = self.stage, self.queue.dropped, time.monotonic()

            def report(finished: int) -> None:
                stage.progress.update(stage.name, step, steps, episodes=min(finished, count), of=count)

            self.queue.begin(step, count, steps)
            self.queue.take(folder, count, report, self._restore)
            dropped = self.queue.dropped - dropped
            now = (time.monotonic(), self.queue.sampling.seconds(), self.queue.judging.seconds())
            passed, sampling, judging = (new - old for new, old in zip(now, self.read, strict=True))
            self.read = now
            figures |= {
                "idle_sampler": passed - sampling,
                "idle_judge": passed - judging,
                "idle_trainer": now[0] - started,
                "dropped_for_age": dropped / (dropped + count),
            }
        self.world.barrier()
        if isinstance(self.sampler, VllmSampler):
            figures |= self.sampler.fleet.figures()
            if self.staleness == 0:
                self.sampler.sleep()
        elif self.staleness > 0 and self.stage.params.engine.zero_stage < 3:
            self._pause()
        # Read them from disk even if they were just written, so that a resumed step computes from the same
        # values as a fresh one.
        sampled = load_trajectories(folder)
        figures["dropped"] = sum(not trajectory.is_judged for trajectory in sampled)
        return list(filter(is_trainable, sampled)), figures | ages(sampled, step)

    def close(self) -> None:
        """End the sampling, and the connections to vLLM servers.

        Trajectories that no training step has taken stay in the stage's folder `sampling`. Does nothing on
        ranks other than 0, which have no sampler.
        """
        if self.queue is not None:
            self._resume()
            self.queue.close()
        if isinstance(self.sampler, VllmSampler):
            self.sampler.fleet.close()


def _measurable(stage: Stage) -> tuple[list[KernelTask], str]:
    """Return the training tasks that the judge can measure, and a clause on how many others are left out.

    The clause, for messages, is "" if there are no others. The judge checks the tasks, unless the result is
    in the file TASK_CHECKS already. Raises UserError if it can measure none of them, or a smaller share than
    sandbox.measurable_share.
    """
    tasks = stage.tasks()
    checks = check_tasks(
        tasks,
        stage.pool,
        stage.params,
        stage.out / TASK_CHECKS,
        least_share=stage.params.sandbox.measurable_share,
        origin=str(stage.dataset / TASKS),
        progress=stage.progress,
    )
    return [task for task in tasks if checks[task.task_id].admitted], left_out(checks)
