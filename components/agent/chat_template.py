"""Compute the token ids that a chat template puts around the sampled turns of an episode, and read turns.

An episode is one attempt of a policy at a task, and a turn is one message that the policy samples. Sampled
token ids are kept as they are and never computed from text again. The template renders what stands between
them: the task's message, and after each turn the messages of its tools with the generation prompt. Text of a
task or a tool that looks like a special token is never encoded as one.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from components.agent.tool_parser import Request, parse_calls
from components.agent.tool_schemas import descriptions
from components.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders in a rendered chat template: a sampled turn, as its text and as an argument of its call (some
# templates render only one); a tool's message; a place at which tokenisation is interrupted. They are random,
# so no observation contains them.
TURN_MARK, CALL_MARK, TOOL_MARK, BREAK = (
    f"{name}-{secrets.token_hex(8)}" for name in ("turn", "call", "tool", "break")
)
# Some templates require an id of nine letters or digits.
CALL_ID = "call00000"
# Tag with which a generation prompt may open the reasoning, and number of tokens at the end of a prompt that
# are searched for this tag.
THOUGHT_START, THOUGHT_TOKENS = "<think>", 8


class ChatTemplate:
    """Chat template of a tokenizer, which encodes the task and the observations and reads sampled turns.

    An observation is the text that a tool call returns to the policy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, described: bool):
        """Use the template of `tokenizer`, which describes the tools to the policy if `described` is set.

        The template determines the form of the descriptions. If the text of the template does not mention
        tools, the policy gets no descriptions, whatever `described` is.
        """
        self.tokenizer = tokenizer
        self.tools = descriptions() if described and "tools" in str(tokenizer.chat_template) else None
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(index for index, token in added.items() if token.special)
        # In some families of models, tags such as those of a call are not special tokens. Other added tokens,
        # such as runs of spaces, have no meaning for the structure of a conversation.
        reserved = [
            re.escape(token.content)
            for token in added.values()
            if token.special or token.content.startswith("<")
        ]
        # Matches the first character of each reserved token.
        self.reserved = re.compile(f"(?={'|'.join(reserved)})." if reserved else r"(?!)", re.DOTALL)

    def first_ids(self, content: str) -> list[int]:
        """Return the token ids of a user message with the text `content` and of the generation prompt."""
        return self._encode(self._render([{"role": "user", "content": self._broken(content)}]))

    def suffix_ids(self, observations: Sequence[str], call: str = "Bash") -> list[int]:
        """Return the token ids between the last token of a sampled turn and the first of the next turn.

        They are the `observations` (the texts that the tool calls of the turn returned) as tool messages,
        followed by the generation prompt. If the template describes the tools, each observation is a message
        of its own. Otherwise one message has all of them. `call` is the name of the tool that the turn calls,
        which some templates repeat. Raises UserError if the template refuses tool messages, leaves out
        messages of the assistant, or ends them without a special token.
        """
        if self.tools is None:
            observations = ["\n".join(observations)]
        # The policy chooses the name freely, so it enters the template only if it has the form of a name.
        name = call if re.fullmatch(r"[\w.-]{1,64}", call) else "unknown"
        ids = self._encode(self._after_turn([self._broken(text) for text in observations], name))
        return ids[ids.index(self._turn_end) + 1 :]

    def conversation_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
        """Return the token ids of an episode with these messages, and a mask of the assistant's turns.

        The mask has a 1 for each token of a turn and a 0 for each other token. Each message has a `role` and
        a `content`. The first one is the task, from the user. The others are turns of the assistant, each
        followed by its observations (the outputs of its calls) from the tool. A turn includes its end-of-turn
        token.
        """
        ids = self.first_ids(messages[0]["content"])
        mask = [0] * len(ids)
        for role, group in itertools.groupby(messages[1:], key=lambda message: message["role"]):
            texts = [message["content"] for message in group]
            if role == "assistant":
                part = [*self._encode(texts[0]), self._turn_end]
            else:
                part = self.suffix_ids(texts)
            ids += part
            mask += [int(role == "assistant")] * len(part)
        return ids, mask

    def read(self, prompt: Sequence[int], ids: Sequence[int]) -> tuple[str, list[Request]]:
        """Return the text of the turn `ids`, which was sampled after `prompt`, and the tool calls in it.

        Both arguments are token ids. Special tokens at the end of the turn are left out of the text. Calls
        within reasoning are ignored, also if the prompt opened the reasoning.
        """
        end = len(ids)
        while end and ids[end - 1] in self.special:
            end -= 1
        text = str(self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False))
        before = str(self.tokenizer.decode(list(prompt[-THOUGHT_TOKENS:]), skip_special_tokens=False))
        return text, parse_calls(text, in_thought=before.rstrip().endswith(THOUGHT_START))

    @functools.cached_property
    def _turn_end(self) -> int:
        """Return the id of the special token with which the template ends a turn that calls a tool.

        If the template puts several special tokens between the call and the tool's answer, the id of the
        end-of-sequence token is returned if this token is among them, and otherwise the id of the first of
        them. Raises UserError if there is no special token.
        """
        text = self._after_turn([TOOL_MARK], "Bash").partition(TOOL_MARK)[0]
        ends = [token for token in self._encode(text) if token in self.special]
        if not ends:
            raise self._unusable("ends a turn without a special token")
        eos = self.tokenizer.eos_token_id
        return int(eos) if eos in ends else ends[0]

    def _after_turn(self, observations: Sequence[str], name: str) -> str:
        """Render a turn that calls the tool `name`, its answers `observations` and the generation prompt.

        The turn has the placeholder TURN_MARK as its content and CALL_MARK as the argument of its call.
        Returns the rendered text from the later of the two placeholders on. Raises UserError if the template
        cannot render these messages or leaves out both placeholders.
        """
        rendered = ""
        # Some templates iterate over the arguments of a call, others join them as text.
        for arguments in ({"text": CALL_MARK}, json.dumps({"text": CALL_MARK})):
            function = {"name": name, "arguments": arguments}
            calls = [{"id": CALL_ID, "type": "function", "function": function}]
            turn = {"role": "assistant", "content": TURN_MARK, "tool_calls": calls}
            answers = [
                {"role": "tool", "content": text, "name": name, "tool_call_id": CALL_ID}
                for text in observations
            ]
            try:
                rendered = self._render([{"role": "user", "content": "?"}, turn, *answers])
                break
            except TemplateError as error:
                raise self._unusable(f"cannot render a tool call and its answer ({error})") from error
            except TypeError:
                continue
        place = max(rendered.find(TURN_MARK), rendered.find(CALL_MARK))
        if place < 0:
            raise self._unusable("leaves out the assistant's own words")
        return rendered[place:]

    def _render(self, messages: Sequence[Any]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, tools=self.tools
            )
        )

    def _broken(self, text: str) -> str:
        """Return `text` with the mark `BREAK` after the first character of each reserved token in it.

        Reserved are the tokenizer's special tokens and its added tokens that begin with "<". `_encode`
        encodes the pieces between the marks separately, so the text is never encoded as a reserved token.
        """
        return self.reserved.sub(rf"\g<0>{BREAK}", text)

    def _encode(self, text: str) -> list[int]:
        return [
            token
            for part in text.split(BREAK)
            for token in self.tokenizer.encode(part, add_special_tokens=False)
        ]

    def _unusable(self, problem: str) -> UserError:
        return UserError(
            f"{self.tokenizer.name_or_path}: the chat template {problem}; "
            "give the folder another chat_template.jinja."
        )
