"""Run rollouts, and the episodes of which they consist: attempts of a policy at a task.

A `RolloutRequest` has the tasks, the pool of judges and the limits of a rollout. An `Episode` has a workspace
and tools, runs the tool calls of each turn, and ends with a verdict on its files. `TokenEpisode` is sampled
as token ids, which are appended to its history as they are and never computed from text again; observations
(what tool calls return) are inserted in the form that the chat template gives tool messages. Each trajectory
(the record of an episode) is sampled by a coroutine, from its prompt to its final verdict, independently of
the others. The episode of a policy that is a chat server, which exchanges messages in place of token ids, is
`ChatEpisode` in chat_rollout.py.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from components.agent.chat_template import ChatTemplate
from components.agent.in_flight import BusyMeter, run_all
from components.agent.rewards import Reward, milestone, reward_of
from components.agent.tool_parser import Request
from components.agent.tools import JudgeFailed, Tools
from components.agent.trajectory import ToolCall, Trajectory, Turn
from components.agent.workspace import Workspace
from components.bootstrap.canonicalize import canonicalize
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool.local_pool import Candidate, Job, JudgePool
from components.judge.verdict import Verdict
from components.policy.prompts import user_message
from components.policy.sampler import Completion, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHORTENED = "[an older observation, shortened]"
# Number of tokens that must be left in the context window; with fewer, an episode ends.
MIN_TURN_TOKENS = 16
# Largest share of the trajectories of a training step, of those of a batch of an evaluation, or of the tasks
# of an evaluation that may be lost because the judge failed. With more, the stage or the evaluation stops.
MAX_LOST_SHARE = 0.25


def judge_failures(failures: Sequence[tuple[str, str]]) -> str:
    """Return a phrase such as "3 REASON: LOG; 1 REASON: LOG" on the failures of a judge.

    `failures` are pairs of the reason (a short code) and the log of a judgement that failed. The phrase has
    each reason with the number of its failures and the first 300 characters of its first log.
    """
    logs = dict(reversed(failures))
    counts = Counter(reason for reason, _ in failures)
    return "; ".join(f"{number} {reason}: {logs[reason][:300]}" for reason, number in counts.most_common())


@dataclass(frozen=True)
class RolloutRequest:
    """Tasks, pool of judges and limits of one rollout, in which a policy attempts the tasks.

    One trajectory, the record of an attempt, is sampled for each entry of `tasks`, which may list a task
    several times. `pool` judges candidates, which are the policy's implementations of a task. `epoch` is a
    name that the caller chooses, such as "episodes/3f2a". It is part of the key under which the judge keeps
    its verdicts, so equal candidates for a task share one measurement only within one epoch. With
    `compare_compile`, candidates are compared with the fastest mode of torch.compile as in an evaluation
    (`Job`).

    A trajectory has at most `max_turns` turns; with 1, the first answer is final. In a turn at most
    `max_new_tokens` tokens are sampled. No turn begins when `time.monotonic()` is past `deadline`, unless
    that is None. With `shorten_history`, a token rollout shortens old observations when the context window is
    full; it is off in training, because a trajectory that is trained on must be one sequence of tokens. A
    chat rollout always shortens them. `first` is the number of trajectories that earlier rollouts of the same
    seed sampled; seeds are counted on from there. `reward` gives a finished trajectory its reward.

    `on_progress` is called with the numbers of finished and of all trajectories, and `on_verdict`, in the
    episode's thread, with each candidate that was judged and its verdict. `stopped` is set when the rollout
    ends early; no further candidate is judged then. `sampling` and `judging` meter the time during which at
    least one episode waits for the policy, and for a verdict.
    """

    tasks: Sequence[KernelTask]
    params: Params
    pool: JudgePool
    epoch: str
    seed: int
    max_turns: int
    max_new_tokens: int
    temperature: float
    deadline: float | None = None
    shorten_history: bool = False
    compare_compile: bool = False
    first: int = 0
    reward: Reward = milestone
    on_progress: Callable[[int, int], None] = lambda *_: None
    on_verdict: Callable[[Candidate, Verdict], None] = lambda *_: None
    stopped: threading.Event = field(default_factory=threading.Event)
    sampling: BusyMeter = field(default_factory=BusyMeter)
    judging: BusyMeter = field(default_factory=BusyMeter)

    @property
    def multi_turn(self) -> bool:
        return self.max_turns > 1

    def stop(self) -> None:
        """Cancel the judge jobs that have not begun, and let no further candidate be judged."""
        self.stopped.set()
        self.pool.drop()

    def session(self, index: int) -> str:
        """Return the unique name of the sampler's session for the trajectory of `tasks[index]`.

        All requests of a trajectory have the same session, so that one vLLM server, whose cache has the
        trajectory's prefix, answers them. Other samplers ignore the session.
        """
        return f"{self.epoch}/{self.first + index}"

    def turn_seed(self, index: int, turn: int) -> int:
        """Return the seed of turn number `turn` in the trajectory of `tasks[index]`; both count from 0."""
        return ((self.seed * 1_000_003 + self.first + index) * 1_000_003 + turn) % 2**63


def first_prompt(params: Params, code: str, *, in_turns: bool) -> str:
    """Return the text of the user message for a task with the source `code`.

    If `policy.prompt` is full, the message has instructions, the source, and an ending that depends on
    `in_turns`, which says whether the policy may take several turns. If it is compact, the message is the
    source, with an ending only if `in_turns` is true. If forward() then is a chain of operators for which the
    cold start (the training of a policy from scratch) has demonstrations, the source is first rewritten so
    that each line of forward() has one operator, as in composed tasks (`bootstrap.canonicalize`). A policy
    that was trained from scratch has seen only this layout.
    """
    if params.policy.prompt == "compact":
        code = canonicalize(code) or code
    return user_message(params.policy, code, in_turns=in_turns, device=params.device)


class Versioned(Protocol):
    """What an episode knows of its policy: the name of its weights."""

    @property
    def version(self) -> str: ...


class Episode(abc.ABC):
    """One attempt of a policy at one task, whose record is returned as a trajectory when the attempt ends."""

    def __init__(self, request: RolloutRequest, index: int, policy: Versioned):
        """Prepare the attempt of `policy` at the task `request.tasks[index]`."""
        self.task = request.tasks[index]
        self.request = request
        self.index = index
        self.policy = policy
        self.params = request.params
        self.workspace = Workspace(self.task)
        self.start = dict(self.workspace.files)
        self.tools = Tools(
            self.workspace,
            self.params.sandbox,
            self.judge,
            context=self.params.policy.context,
            read_first=request.multi_turn,
        )
        self.turns: list[Turn] = []
        self.finish_reason = ""
        self.error = ""
        # The verdict of the judge that failed during a tool call, which ended the episode.
        self.failure: Verdict | None = None
        # What is shortened in the history from which the present turn is sampled, counted as in
        # `Turn.shortened`.
        self.shortened = 0
        # The token ids so far, with the mask of those that were sampled and their log-probabilities, and the
        # name of the weights that sampled each of them. They stay empty if the policy is a chat server.
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []

    async def run(self) -> Trajectory:
        """Sample turns until the episode ends, judge the final files and return the trajectory."""
        with contextlib.closing(self.tools):
            while not self.finish_reason:
                if self.request.deadline is not None and time.monotonic() > self.request.deadline:
                    self.finish_reason = "time"
                else:
                    await self.take_turn()
            return await asyncio.to_thread(self.finish)

    @abc.abstractmethod
    async def take_turn(self) -> None:
        """Sample one turn (a message of the policy) and run its tool calls, or end the episode.

        The episode ends when `finish_reason` is set.
        """

    def first_message(self) -> dict[str, str]:
        """Return the message, with the keys `role` and `content`, in which the user states the task."""
        return {
            "role": "user",
            "content": first_prompt(self.params, self.task.code, in_turns=self.request.multi_turn),
        }

    def judge(self) -> Verdict:
        """Return the judge's verdict on the current files of the workspace.

        If the same files were already judged for this task with the same `RolloutRequest.epoch`, the earlier
        verdict is returned. Raises CancelledError if the rollout was stopped.
        """
        # A copy, because a command in the background may be judged while another call changes the files.
        candidate, request = Candidate.of(dict(self.workspace.files)), self.request
        if request.stopped.is_set():
            raise CancelledError
        with request.judging.busy():
            job = Job(self.task, candidate, request.epoch, compare_compile=request.compare_compile)
            future = request.pool.submit(job)
            if request.stopped.is_set():  # submitted after the waiting jobs were cancelled
                future.cancel()
            verdict = future.result()
        request.on_verdict(candidate, verdict)
        return verdict

    def perform(self, text: str, requests: Sequence[Request], *, cut: bool) -> tuple[ToolCall, ...]:
        """Run the tool calls of a sampled turn, record the turn, and return the calls with observations.

        A turn is one message of the policy, `text` is the turn as text, and `requests` are the calls in it.
        `cut` says whether the turn reached its token limit. Sets `finish_reason` if the turn ends the
        episode. If the judge fails in a call, the episode ends, and neither this call nor those after it are
        returned.
        """
        run: list[ToolCall] = []
        try:
            for request in requests:
                run.append(self.tools.run(request))
        except JudgeFailed as error:
            self.failure, self.error = error.verdict, str(error)
        self.turns.append(Turn(text, tuple(run), self.shortened))
        endings = {
            "judge": self.failure is not None,
            "length": cut,
            "stop": not run,
            "turns": len(self.turns) == self.request.max_turns,
        }
        self.finish_reason = next((reason for reason, is_met in endings.items() if is_met), "")
        return self.turns[-1].calls

    def finish(self) -> Trajectory:
        """End the episode, judge the final files unless the judge has failed, and return the trajectory.

        The trajectory has a reward unless the judge failed.
        """
        self.tools.close()
        final = self.failure or self.judge()
        trajectory = Trajectory(
            task_id=self.task.task_id,
            ids=self.ids,
            action_mask=self.mask,
            sampler_logprob=self.logprobs,
            turns=tuple(self.turns),
            verdicts=(*self.tools.verdicts, final),
            reward=None,
            finish_reason=self.finish_reason,
            policy_version=self.versions[-1] if self.versions else self.policy.version,
            versions=tuple((name, len(list(same))) for name, same in itertools.groupby(self.versions)),
            files=dict(self.workspace.files),
            error=self.error,
            task=self.task.code,
            start=self.start,
            settings={
                "device": self.params.device,
                "in_turns": self.request.multi_turn,
                "context": self.params.policy.context,
            },
        )
        return dataclasses.replace(trajectory, reward=reward_of(trajectory, self.request.reward))


class TokenEpisode(Episode):
    """Episode (one attempt at a task) whose policy is sampled as token ids, all of which are recorded."""

    def __init__(
        self, request: RolloutRequest, index: int, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
    ):
        super().__init__(request, index, sampler)
        self.sampler = sampler
        # Policies with the compact prompt are trained without descriptions of the tools. For others, the chat
        # template describes the tools.
        self.template = ChatTemplate(tokenizer, described=self.params.policy.prompt == "full")
        self._append(self.template.first_ids(self.first_message()["content"]))
        # Begin and end of the observations in `ids` and the name of the first call, for each turn.
        self.observed: list[tuple[int, int, str]] = []

    def _append(
        self, ids: Sequence[int], logprobs: Sequence[float] = (), versions: Sequence[str] = ()
    ) -> None:
        """Append token ids to the history.

        If the policy sampled them, `logprobs` (in nats) and `versions` (names of the weights that sampled)
        have an entry for each. Otherwise both are empty.
        """
        self.ids += ids
        self.mask += [1 if versions else 0] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.versions += versions

    def prompt(self) -> list[int]:
        """Return the token ids of the history from which the next turn is sampled.

        If `request.shorten_history` is set, the observations (what tool calls returned) of the oldest turns
        are shortened, those of one turn together, until an eighth of the context window, or 4096 tokens if
        that is less, is free for the next turn. The observations of the latest turn are never shortened. Sets
        `shortened` to the number of turns whose observations are shortened.
        """
        ids, self.shortened = self.ids, 0
        capacity = self.params.policy.context - min(self.params.policy.context // 8, 4096)
        if not self.request.shorten_history or len(ids) <= capacity:
            return ids
        short = {
            call: self.template.suffix_ids([SHORTENED], call)
            for call in {call for _, _, call in self.observed}
        }
        while len(ids) > capacity and self.shortened < len(self.observed) - 1:
            self.shortened += 1
            pieces, end = [], 0
            for start, stop, call in self.observed[: self.shortened]:
                pieces += [*self.ids[end:start], *min(self.ids[start:stop], short[call], key=len)]
                end = stop
            ids = [*pieces, *self.ids[end:]]
        return ids

    async def take_turn(self) -> None:
        """Sample a turn, which is one message of the policy, and run its tool calls.

        If fewer than `MIN_TURN_TOKENS` tokens are left in the context window, the episode ends instead, with
        the `finish_reason` length.
        """
        prompt = self.prompt()
        room = self.params.policy.context - len(prompt)
        if room < MIN_TURN_TOKENS:
            self.finish_reason = "length"
            return
        with self.request.sampling.busy():
            completion = await self.sampler.complete(
                prompt,
                max_new_tokens=min(self.request.max_new_tokens, room),
                temperature=self.request.temperature,
                seed=self.request.turn_seed(self.index, len(self.turns)),
                session=self.request.session(self.index),
            )
        await asyncio.to_thread(self._act, completion)

    def _act(self, completion: Completion) -> None:
        """Append a sampled turn, which is one message of the policy, to the history and run its tool calls.

        Unless the turn ends the episode, the observations of the calls are appended as well.
        """
        text, requests = self.template.read(self.ids, completion.ids)
        self._append(completion.ids, completion.logprobs, completion.versions)
        calls = self.perform(text, requests, cut=completion.finish_reason == "length")
        if not self.finish_reason:
            name = calls[0].name
            suffix = self.template.suffix_ids([call.observation for call in calls], name)
            self.observed.append((len(self.ids), len(self.ids) + len(suffix), name))
            self._append(suffix)


async def run_episode(
    request: RolloutRequest, index: int, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> Trajectory:
    """Sample a trajectory, the record of one attempt, for the task `request.tasks[index]` and return it.

    The final verdict is on the files of the candidate, the policy's implementation of the task, at the end. A
    mistake of the policy, such as a wrong tool call, raises no exception. If the final verdict has the status
    `infrastructure`, the judge failed, so the trajectory must not be used to assess the policy, and it has no
    reward.
    """
    episode = await asyncio.to_thread(TokenEpisode, request, index, sampler, tokenizer)
    return await episode.run()


def run_episodes(
    request: RolloutRequest, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> list[Trajectory]:
    """Sample one trajectory for each task of `request` with `run_episode`, in the order of the tasks.

    At most `sampler.capacity()` episodes run at the same time.
    """
    return run_all(
        len(request.tasks),
        lambda index: run_episode(request, index, sampler, tokenizer),
        sampler.capacity,
        on_progress=request.on_progress,
        stop=request.stop,
    )
