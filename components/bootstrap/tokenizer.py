"""Train the tokenizer of a policy that is made from scratch, and tokenise conversations.

The byte-pair merges of the tokenizer can join whole lines, and also runs of lines that never change (the head
of a file, the tags of a tool call). So a kernel has only about 20 tokens, one for each operator. Each common
constant is one token, because a small policy makes mistakes when it copies a constant that has several
tokens. A conversation is tokenised in the same pieces as in the agent loop (the prompt, each sampled turn,
and the text between two turns), so that training and sampling use equal ids.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Type of a message, which has a `role` (system, user, assistant or tool) and a `content`.
Message = dict[str, str]

PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Pattern of a run of lines that have no assignment, semicolon or digit, or of a single other line.
PIECE = r"(?:(?![^\n]*(?: = |[;0-9]))(?:[^\n]*\n|[^\n]+$))+|[^\n]*\n"
# Pattern of a decimal with at most two digits after the point, or of an integer with at least three digits.
# The sign is not included. The digits of `1e-5`, `t[0]` or `0.70710678f` do not match.
CONSTANT = r"(?<![\w.])(?:\d+\.\d{1,2}|\d{3,})(?![\d])"

# Least share of the texts in which a constant must occur to become one token.
COMMON = 0.002


def train_tokenizer(messages: Sequence[Message], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a ChatML template on messages, and return it.

    Each message has a `role` and a `content`. `vocabulary` is the largest number of tokens, including the
    special tokens and the 256 bytes. `context` is the largest number of tokens of an input.
    """
    texts = [part for message in messages for part in _parts(message)]
    counts = Counter(constant for text in texts for constant in set(re.findall(CONSTANT, text)))
    common = [constant for constant, count in counts.items() if count >= max(3, COMMON * len(texts))]
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
    # Common constants are added so often that each is merged into one token before rarer lines are.
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


def _parts(message: Message) -> list[str]:
    """Return the texts of a message on which the tokenizer is trained separately.

    These are the role and the content of a message of the assistant, and one text of both for other messages.
    """
    heading, content = f"{message['role']}\n", message["content"]
    return [heading, content] if message["role"] == "assistant" else [heading + content]


def pieces(messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Split a conversation in ChatML into pieces (text, whether the policy samples it).

    Each message has a `role` and a `content`. Each piece is tokenised separately. The concatenated texts are
    equal to the text of the chat template, without the newline at its end.
    """
    texts: list[tuple[str, bool]] = []
    before = ""
    for message in messages:
        before += f"{TURN_START}{message['role']}\n"
        if message["role"] == "assistant":
            texts += [(before, False), (message["content"] + TURN_END, True)]
            before = "\n"
        else:
            before += f"{message['content']}{TURN_END}\n"
    return texts if before == "\n" else [*texts, (before.removesuffix("\n"), False)]


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Sequence[Message]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of each conversation, and a mask that is 1 on the ids of the assistant's turns.

    Each message of a conversation has a `role` and a `content`. A turn includes its end-of-turn token. Equal
    pieces of text are tokenised only once.
    """
    split = [pieces(conversation) for conversation in conversations]
    texts = sorted({text for conversation in split for text, _ in conversation})
    # The tokenizer refuses an empty list.
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    ids = dict(zip(texts, encoded, strict=True))
    for conversation in split:
        yield (
            [token for text, _ in conversation for token in ids[text]],
            [int(sampled) for text, sampled in conversation for _ in ids[text]],
        )
