"""The tokenizer of a policy made from scratch, and how a conversation becomes tokens.

Byte-level pairs merged over whole lines, and over runs of lines that never change (the head of a file, the tags of a
tool call): a kernel is then about 20 tokens, one for each operator, where merges within words need 200. Constants are
set apart: a constant split across tokens cost a third of the correctness (knowledge, tiny_policy). A conversation is
tokenised in the pieces in which the agent loop meets it (prompt, sampled turn, suffix), so that training and sampling
see equal ids.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Message = dict[str, str]
"""A message: its `role` (system, user, assistant, tool) and `content`."""

PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECE = r"(?:(?![^\n]*(?: = |[;0-9]))(?:[^\n]*\n|[^\n]+$))+|[^\n]*\n"
"""A run of lines without an assignment, a statement's end or a digit; else a single line."""
CONSTANT = r"(?<![\w.])(?:\d+\.\d{1,2}|\d{3,})(?![\d])"
"""A short decimal or a size, without its sign; the digits of idioms such as `1e-5`, `t[0]`, `0.70710678f` stay in their line."""

COMMON = 0.002
"""Share of the texts in which a constant must occur to be one token for certain."""


def train_tokenizer(messages: Sequence[Message], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Learn merges from `messages`; `vocabulary` counts the special tokens and 256 bytes too, `context` is in tokens."""
    texts = [part for message in messages for part in _parts(message)]
    found = Counter(constant for text in texts for constant in set(re.findall(CONSTANT, text)))
    common = [constant for constant, count in found.items() if count >= max(3, COMMON * len(texts))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.Split(Regex(CONSTANT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PADDING, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Nearly as often as a line that every text holds, so that a common constant becomes a token before rarer lines do.
    tokenizer.train_from_iterator([*texts, *common * (len(texts) // 4)], trainer)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _heading(message: Message) -> str:
    """What stands between the start of a message and its content."""
    return f"{message['role']}\n"


def _parts(message: Message) -> list[str]:
    """What is tokenised as one text: an assistant's turn is sampled after its heading."""
    apart = message["role"] == "assistant"
    return [_heading(message), message["content"]] if apart else [_heading(message) + message["content"]]


def pieces(messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """A conversation in ChatML as the agent loop meets it: each text that is tokenised by itself, and whether the
    assistant says it. Joined they are the chat template's text without the newline at its end."""
    result: list[tuple[str, bool]] = []
    before = ""
    for message in messages:
        before += TURN_START + _heading(message)
        if message["role"] == "assistant":
            result += [(before, False), (message["content"] + TURN_END, True)]
            before = "\n"
        else:
            before += f"{message['content']}{TURN_END}\n"
    return result if before == "\n" else [*result, (before.removesuffix("\n"), False)]


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and a mask that is 1 on what the assistant says, its end-of-turn token included."""
    ids: list[int] = []
    mask: list[int] = []
    for text, own in pieces(messages):
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [int(own)] * len(piece)
    return ids, mask
