"""Make, store and load the training text of a cold start, and divide it into micro-batches.

A cold start is the training of a policy from scratch on demonstrations, which are conversations that are
written by rules.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import Message, encode_conversations, train_tokenizer
from components.core.errors import refuse
from components.core.files import atomic_folder
from components.core.params import Params
from components.core.progress import Progress
from components.core.task import KernelTask
from components.policy.checkpoint import load_tokenizer

# Number of demonstrations of each task. It is larger than 1, because composing a task takes about ten times
# as long as writing a demonstration.
PER_TASK = 3
# Number of conversations on which the tokenizer is trained.
TOKENIZER_CONVERSATIONS = 2000
# Number of micro-batches in a step. The sequences of one micro-batch have about the same length.
MICROBATCHES = 4


@dataclass(frozen=True)
class Corpus:
    """Tokenised conversations, which are concatenated in `ids` and `action_mask` [tokens].

    Conversation i is the slice offsets[i]:offsets[i + 1]; `offsets` is [conversations + 1]. `action_mask` is
    True on the assistant's tokens.
    """

    ids: Tensor
    action_mask: Tensor
    offsets: Tensor
    tokenizer: PreTrainedTokenizerBase

    def rows(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return ids and action_mask [rows, longest] of the conversations `indices`, padded on the right."""
        spans = [slice(int(self.offsets[i]), int(self.offsets[i + 1])) for i in indices]
        ids = torch.nn.utils.rnn.pad_sequence(
            [self.ids[span].long() for span in spans],
            batch_first=True,
            padding_value=int(self.tokenizer.pad_token_id),
        )
        mask = torch.nn.utils.rnn.pad_sequence([self.action_mask[span] for span in spans], batch_first=True)
        return ids, mask


def make_corpus(params: Params, sources: Iterator[KernelTask], folder: Path, progress: Progress) -> None:
    """Write demonstrations of training tasks, train a tokenizer on them, and store both in `folder`.

    The demonstrations are conversations that are written by rules for the tasks `sources`. They are stored as
    token ids. Raises UserError if `sources` has too few tasks, or if no demonstration fits into the context
    window.
    """
    context = params.policy.context
    conversations = write_conversations(params, sources, progress)
    sample = [message for conversation in conversations[:TOKENIZER_CONVERSATIONS] for message in conversation]
    tokenizer = train_tokenizer(sample, params.policy.vocabulary, context)
    store_corpus(encode_conversations(tokenizer, conversations), tokenizer, context, folder)


def store_corpus(
    conversations: Iterable[tuple[Sequence[int], Sequence[int]]],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    folder: Path,
) -> None:
    """Write conversations, which are pairs of token ids and action mask, and their tokenizer to `folder`.

    Conversations of more than `context` tokens are left out. Raises UserError if none is left.
    """
    rows = [
        (torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))
        for ids, mask in conversations
        if len(ids) <= context
    ]
    refuse((not rows, f"policy.context: no demonstration fits into {context} tokens; raise it."))
    tensors = {
        "ids": torch.cat([ids for ids, _ in rows]),
        "action_mask": torch.cat([mask for _, mask in rows]),
        "offsets": torch.tensor([0, *(len(ids) for ids, _ in rows)]).cumsum(0),
    }
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        save_file(tensors, temporary / "tokens.safetensors")


def write_conversations(
    params: Params, sources: Iterator[KernelTask], progress: Progress
) -> list[list[Message]]:
    """Return demonstrations, which are conversations written by rules, in random order.

    Their number is the parameter coldstart.demonstrations. There are PER_TASK of each task of `sources` that
    is not held out, but the last task may have fewer. Raises UserError if `sources` has too few tasks.
    """
    settings = params.coldstart
    assert isinstance(settings.demonstrations, int)
    rng = random.Random(settings.seed)
    count = -(-settings.demonstrations // PER_TASK)
    conversations: list[list[Message]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The composer's tensors are small.
    try:
        for number, task in enumerate(islice((task for task in sources if task.split == "train"), count)):
            conversations += [make_demonstration(task, rng, settings, params.device) for _ in range(PER_TASK)]
            if number % 500 == 0:
                progress.update("coldstart", 0, settings.steps, demonstrations=len(conversations))
    finally:
        torch.set_num_threads(threads)
    fault = (
        f"coldstart.demonstrations: {settings.demonstrations} need {count} training tasks, "
        "the sources hold fewer; lower it."
    )
    refuse((len(conversations) < settings.demonstrations, fault))
    rng.shuffle(conversations)
    return conversations[: settings.demonstrations]


def load_corpus(folder: Path) -> Corpus:
    """Return the corpus that `store_corpus` wrote to `folder`: tokenised conversations and a tokenizer."""
    return Corpus(**load_file(folder / "tokens.safetensors"), tokenizer=load_tokenizer(folder))


def plan_batches(
    lengths: list[int], *, steps: int, tokens_per_step: int, microbatches: int, seed: int
) -> list[list[list[int]]]:
    """Divide conversations into micro-batches of similar length.

    `lengths` are the numbers of tokens of the conversations. The result [step][microbatch] is a list of
    indices into `lengths`. Conversations are used again when all have been used, with the micro-batches in a
    new random order. A micro-batch has at least one conversation and, if it has more, at most tokens_per_step
    / microbatches tokens including padding.
    """
    rng = random.Random(seed)
    max_tokens = tokens_per_step // microbatches
    batches: list[list[int]] = []
    while len(batches) < steps * microbatches:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        order.sort(key=lambda index: lengths[index])
        epoch: list[list[int]] = []
        current: list[int] = []
        for index in order:
            if current and (len(current) + 1) * lengths[index] > max_tokens:
                epoch.append(current)
                current = []
            current.append(index)
        epoch.append(current)
        rng.shuffle(epoch)
        batches += epoch
    return [batches[step * microbatches : (step + 1) * microbatches] for step in range(steps)]
