"""Rollouts over a sampler of tokens: many episodes in parallel with one sampler and one judge pool.

The sampler samples a turn for all unfinished episodes together, then the tool calls of these turns run in
parallel, and then the next turn begins. Sampled token ids are appended to the history as they are and never
computed from text again. Observations are inserted in the form that the chat template gives tool messages.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from components.agent.episode import SHORTENED, Episode, RolloutRequest, episode_threads
from components.agent.tool_parser import parse_calls
from components.agent.tool_schemas import descriptions
from components.agent.trajectory import Trajectory
from components.core.errors import UserError
from components.core.task import KernelTask
from components.policy.sampler import Completion, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Number of tokens that must be left in the context window; with fewer, an episode ends.
MIN_TURN_TOKENS = 16
# Placeholders for a sampled turn in a rendered chat template, as the text of the turn and as an argument of
# its call, because some templates render only one. They are random, so no observation contains them.
TURN_MARK, CALL_MARK = (f"{name}-{secrets.token_hex(8)}" for name in ("turn", "call"))
# Some templates require an id of nine letters or digits.
CALL_ID = "call00000"
# Token that begins the header of a message in gpt-oss's harmony format, where special tokens mark tool calls.
HARMONY = "<|channel|>"


def suffix_ids(
    tokenizer: PreTrainedTokenizerBase,
    observations: Sequence[str],
    tools: list[Any] | None = None,
    call: str = "Bash",
) -> list[int]:
    """Return the token ids between the last token of a sampled turn and the first of the next turn.

    The chat template renders them from a tool message for each observation and the generation prompt. `call`
    is the name of the tool that the turn calls, which some templates repeat. Raises UserError if the chat
    template refuses tool messages, leaves out messages of the assistant, or ends them without a special
    token.
    """
    function = {"name": call, "arguments": {"text": CALL_MARK}}
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": TURN_MARK,
            "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
        },
        *({"role": "tool", "content": text, "name": call, "tool_call_id": CALL_ID} for text in observations),
    ]
    folder, remedy = tokenizer.name_or_path, "give the folder another chat_template.jinja."
    try:
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools)
        )
    except TemplateError as error:
        raise UserError(
            f"{folder}: the chat template cannot render a tool call and its answer ({error}); {remedy}"
        ) from error
    place = max(text.find(TURN_MARK), text.find(CALL_MARK))
    if place < 0:
        raise UserError(f"{folder}: the chat template leaves out the assistant's own words; {remedy}")
    ids: list[int] = tokenizer.encode(text[place:], add_special_tokens=False)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    end = next((index for index, token in enumerate(ids) if token in special), None)
    if end is None:
        raise UserError(f"{folder}: the chat template ends a turn without a special token; {remedy}")
    return ids[end + 1 :]


class TokenEpisode(Episode):
    """Episode whose policy is sampled as token ids, all of which are recorded."""

    def __init__(self, task: KernelTask, request: RolloutRequest, tokenizer: PreTrainedTokenizerBase):
        super().__init__(task, request)
        self.tokenizer = tokenizer
        # A policy with the compact prompt knows its tools. For others, the chat template describes the tools.
        described = self.params.policy.prompt == "full" and "tools" in str(tokenizer.chat_template)
        self.descriptions = descriptions() if described else None
        self.is_harmony = HARMONY in str(tokenizer.chat_template)
        text = str(
            tokenizer.apply_chat_template(
                [self.first_message()], tokenize=False, add_generation_prompt=True, tools=self.descriptions
            )
        )
        self.ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
        self.mask = [0] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        # Begin and end of the observations in `ids` and the name of the first call, for each turn.
        self.observed: list[tuple[int, int, str]] = []
        self.shortened = 0

    def prompt(self, *, shorten: bool) -> list[int]:
        """Return the token ids of the history from which the next turn is sampled.

        With `shorten`, the oldest observations are shortened until there is room for a turn in the context
        window. The observations of the latest turn are never shortened.
        """
        ids, self.shortened = self.ids, 0
        capacity = self.params.policy.context - min(self.params.policy.context // 8, 4096)
        if not shorten or len(ids) <= capacity:
            return ids
        short = {
            call: suffix_ids(self.tokenizer, [SHORTENED], self.descriptions, call)
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
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        text = str(self.tokenizer.decode(list(completion.ids), skip_special_tokens=not self.is_harmony))
        calls = self.perform(
            text,
            parse_calls(text),
            cut=completion.finish_reason == "length",
            last=last,
            shortened=self.shortened,
        )
        if not self.finish_reason:
            observations = [call.observation for call in calls]
            # There is one message for each call if the chat template describes the tools, else one for all.
            messages = observations if self.descriptions is not None else ["\n".join(observations)]
            # The policy may call anything; what is no name of a tool must not enter the template.
            name = calls[0].name if re.fullmatch(r"[\w.-]{1,64}", calls[0].name) else "unknown"
            suffix = suffix_ids(self.tokenizer, messages, self.descriptions, name)
            self.observed.append((len(self.ids), len(self.ids) + len(suffix), name))
            self.ids += suffix
            self.mask += [0] * len(suffix)
            self.logprobs += [0.0] * len(suffix)


def run_episodes(
    request: RolloutRequest, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> list[Trajectory]:
    """Return one trajectory per task of `request`, in order.

    The final verdict of a trajectory is on the candidate's files at its end. A mistake of the policy, such as
    a wrong tool call, raises no exception. If the final verdict has the status `infrastructure`, the judge
    failed, so the trajectory must not be used to assess the policy.
    """
    episodes = [TokenEpisode(task, request, tokenizer) for task in request.tasks]
    context = request.params.policy.context
    live = list(episodes)
    with episode_threads(episodes, request.pool) as threads:
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
        ends = [
            threads.submit(episode.finish, sampler.version, episode.ids, episode.mask, episode.logprobs)
            for episode in episodes
        ]
        return [end.result() for end in ends]
