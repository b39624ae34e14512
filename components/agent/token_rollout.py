"""Rollouts with a sampler of tokens: many episodes at the same time with one sampler and one judge pool.

Each trajectory is sampled by a coroutine, from its prompt to its final verdict, independently of the others.
Sampled token ids are appended to the history as they are and never computed from text again. Observations are
inserted in the form that the chat template gives tool messages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from components.agent.chat_template import ChatTemplate
from components.agent.episode import SHORTENED, Episode, RolloutRequest, run_all
from components.agent.trajectory import Trajectory
from components.core.task import KernelTask
from components.policy.sampler import Completion, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Number of tokens that must be left in the context window; with fewer, an episode ends.
MIN_TURN_TOKENS = 16


class TokenEpisode(Episode):
    """Episode whose policy is sampled as token ids, all of which are recorded."""

    def __init__(self, task: KernelTask, request: RolloutRequest, tokenizer: PreTrainedTokenizerBase):
        super().__init__(task, request)
        # Policies with the compact prompt are trained without descriptions of the tools. For others, the chat
        # template describes the tools.
        self.template = ChatTemplate(tokenizer, described=self.params.policy.prompt == "full")
        self.ids = self.template.first_ids(self.first_message()["content"])
        self.mask = [0] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        # Names of the weights that sampled the own tokens, in order, each with its number of tokens.
        self.versions: list[tuple[str, int]] = []
        # Begin and end of the observations in `ids` and the name of the first call, for each turn.
        self.observed: list[tuple[int, int, str]] = []
        self.shortened = 0

    def prompt(self, *, shorten: bool) -> list[int]:
        """Return the token ids of the history from which the next turn is sampled.

        With `shorten`, the oldest observations are shortened until an eighth of the context window, or 4096
        tokens if that is less, is free for the turn. The observations of the latest turn are never shortened.
        """
        ids, self.shortened = self.ids, 0
        capacity = self.params.policy.context - min(self.params.policy.context // 8, 4096)
        if not shorten or len(ids) <= capacity:
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

    def act(self, completion: Completion, last: bool) -> None:
        """Append a sampled turn to the history and run its tool calls.

        Unless the turn ends the episode, the observations of the calls are appended as well. `last` says
        whether no further turn is allowed.
        """
        text, requests = self.template.read(self.ids, completion.ids)
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        versions = completion.versions
        for version in [versions] * len(completion.ids) if isinstance(versions, str) else versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1] + 1)
            else:
                self.versions.append((version, 1))
        calls = self.perform(
            text,
            requests,
            cut=completion.finish_reason == "length",
            last=last,
            shortened=self.shortened,
        )
        if not self.finish_reason:
            observations = [call.observation for call in calls]
            name = calls[0].name
            suffix = self.template.suffix_ids(observations, name)
            self.observed.append((len(self.ids), len(self.ids) + len(suffix), name))
            self.ids += suffix
            self.mask += [0] * len(suffix)
            self.logprobs += [0.0] * len(suffix)


async def run_episode(
    request: RolloutRequest, index: int, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> Trajectory:
    """Sample a trajectory for the task `request.tasks[index]` and return it.

    The final verdict is on the candidate's files at the end of the episode. A mistake of the policy, such as
    a wrong tool call, raises no exception. If the final verdict has the status `infrastructure`, the judge
    failed, so the trajectory must not be used to assess the policy.
    """
    episode = await asyncio.to_thread(TokenEpisode, request.tasks[index], request, tokenizer)
    context = request.params.policy.context
    try:
        for turn in range(request.max_turns):
            prompt = episode.prompt(shorten=request.shorten_history)
            room = context - len(prompt)
            if room < MIN_TURN_TOKENS:
                episode.finish_reason = "length"
            elif request.is_out_of_time():
                episode.finish_reason = "time"
            if episode.finish_reason:
                break
            with request.sampling.busy():
                completion = await sampler.complete(
                    prompt,
                    max_new_tokens=min(request.max_new_tokens, room),
                    temperature=request.temperature,
                    seed=request.turn_seed(index, turn),
                    session=request.session(index),
                )
            await asyncio.to_thread(episode.act, completion, turn + 1 == request.max_turns)
            if episode.finish_reason:
                break
        version = episode.versions[-1][0] if episode.versions else sampler.version
        return await asyncio.to_thread(
            episode.finish, version, episode.ids, episode.mask, episode.logprobs, tuple(episode.versions)
        )
    finally:
        episode.tools.close()


def run_episodes(
    request: RolloutRequest, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> list[Trajectory]:
    """Sample one trajectory for each task of `request` with `run_episode`, and return them in order.

    At most `sampler.capacity()` episodes run at the same time.
    """
    return run_all(
        request, lambda index: run_episode(request, index, sampler, tokenizer), capacity=sampler.capacity
    )
