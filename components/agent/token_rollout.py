"""Rollouts over a sampler of tokens: many episodes side by side with one sampler and one judge pool.

All unfinished episodes sample a turn together, then their calls run in parallel, then the next turn begins.
Token ids are appended and never encoded again from text; observations are inserted as the chat template
writes them after a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from components.agent.episode import SHORTENED, Episode, abandon
from components.agent.rollout import RolloutRequest
from components.agent.tool_parser import parse_calls
from components.agent.tool_schemas import descriptions
from components.agent.trajectory import ToolCall, Trajectory
from components.core.errors import UserError
from components.core.task import KernelTask
from components.policy.sampler import Completion, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PARALLEL_CALLS = 64
MIN_TURN_TOKENS = 16
"""An episode ends when fewer tokens are left in the context window."""
MARK = "\u2402assistant\u2403"
"""Placeholder of a sampled turn in the chat template, which occurs in no template and no prompt."""


def suffix_ids(
    tokenizer: PreTrainedTokenizerBase, observations: Sequence[str], tools: list[Any] | None = None
) -> list[int]:
    """Return the ids between a sampled turn, its end-of-turn token included, and the next turn.

    They are a tool message for each observation and the generation prompt, as the chat template writes them.
    """
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": MARK},
        *({"role": "tool", "content": text} for text in observations),
    ]
    text = str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools)
    )
    _, mark, after = text.partition(MARK)
    if not mark:
        raise UserError(
            f"the chat template of the policy ({tokenizer.name_or_path}) leaves out the assistant's own "
            f"words; give the folder another chat_template.jinja."
        )
    return list(
        tokenizer.encode(after.lstrip().removeprefix(str(tokenizer.eos_token)), add_special_tokens=False)
    )


class TokenEpisode(Episode):
    """An episode whose policy reads and writes token ids, all of which are recorded."""

    def __init__(self, task: KernelTask, request: RolloutRequest, tokenizer: PreTrainedTokenizerBase):
        super().__init__(task, request.params, request.pool, request.epoch, in_turns=request.multi_turn)
        self.tokenizer = tokenizer
        # A policy with the compact prompt knows its tools; for others the chat template describes them.
        described = self.params.policy.prompt == "full" and "tools" in str(tokenizer.chat_template)
        self.descriptions = descriptions() if described else None
        text = str(
            tokenizer.apply_chat_template(
                [self.first_message()], tokenize=False, add_generation_prompt=True, tools=self.descriptions
            )
        )
        self.ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
        self.mask = [0] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.observed: list[tuple[int, int]] = []
        """Begin and end of each turn's observations in `ids`."""
        self.shortened = 0

    def prompt(self, *, shorten: bool) -> list[int]:
        """The history to sample from.

        With `shorten`, the oldest observations give way until a turn fits into the window.
        """
        ids, self.shortened = self.ids, 0
        capacity = self.params.policy.context - min(self.params.policy.context // 8, 4096)
        if not shorten or len(ids) <= capacity:
            return ids
        short = suffix_ids(self.tokenizer, [SHORTENED], self.descriptions)
        while len(ids) > capacity and self.shortened < len(self.observed) - 1:
            self.shortened += 1
            pieces, end = [], 0
            for start, stop in self.observed[: self.shortened]:
                pieces += [*self.ids[end:start], *min(self.ids[start:stop], short, key=len)]
                end = stop
            ids = [*pieces, *self.ids[end:]]
        return ids

    def act(self, completion: Completion, last: bool) -> None:
        """Append a sampled turn, run its calls and append their observations, or end the episode."""
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        text = str(self.tokenizer.decode(list(completion.ids), skip_special_tokens=True))
        calls = self.perform(
            text,
            parse_calls(text),
            cut=completion.finish_reason == "length",
            last=last,
            shortened=self.shortened,
        )
        if not self.finish_reason:
            suffix = suffix_ids(self.tokenizer, self._messages(calls), self.descriptions)
            self.observed.append((len(self.ids), len(self.ids) + len(suffix)))
            self.ids += suffix
            self.mask += [0] * len(suffix)
            self.logprobs += [0.0] * len(suffix)

    def end(self, version: str) -> Trajectory:
        return self.finish(version, self.ids, self.mask, self.logprobs)

    def _messages(self, calls: Sequence[ToolCall]) -> list[str]:
        """Return a message per call where the template knows tools; the compact form has one for all."""
        observations = [call.observation for call in calls]
        return observations if self.descriptions is not None else ["\n".join(observations)]


def run_episodes(
    request: RolloutRequest, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> list[Trajectory]:
    """Return one trajectory per task, in order; the final answer is the workspace when its episode ends.

    Nothing that a policy does raises an exception. A final verdict `infrastructure` means that the trajectory
    says nothing about the policy.
    """
    episodes = [TokenEpisode(task, request, tokenizer) for task in request.tasks]
    context = request.params.policy.context
    live = list(episodes)
    with ThreadPoolExecutor(max_workers=MAX_PARALLEL_CALLS, thread_name_prefix="episode") as threads:
        try:
            for turn in range(request.max_turns):
                prompts = {id(episode): episode.prompt(shorten=request.shorten_history) for episode in live}
                for episode in live:
                    if context - len(prompts[id(episode)]) < MIN_TURN_TOKENS:
                        episode.finish_reason = "length"
                    elif request.is_out_of_time():
                        episode.finish_reason = "time"
                live = [episode for episode in live if not episode.finish_reason]
                if not live:
                    break
                histories = [prompts[id(episode)] for episode in live]
                completions = sampler.generate(
                    histories,
                    max_new_tokens=min(request.max_new_tokens, context - max(map(len, histories))),
                    temperature=request.temperature,
                    seed=request.seed * 1_000_003 + turn,
                )
                last = turn + 1 == request.max_turns
                for future in [
                    threads.submit(episode.act, completion, last)
                    for episode, completion in zip(live, completions, strict=True)
                ]:
                    future.result()
                live = [episode for episode in live if not episode.finish_reason]
                request.on_progress(len(episodes) - len(live), len(episodes))
            return list(threads.map(lambda episode: episode.end(sampler.version), episodes))
        except BaseException:
            abandon(episodes, threads, request.pool)
            raise
        finally:
            for episode in episodes:
                episode.tools.close()
