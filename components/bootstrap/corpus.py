"""The text that a policy made from scratch learns from: demonstrations as tokens, cut into the batches of every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import pieces, train_tokenizer
from components.core.config import Params
from components.core.errors import UserError
from components.core.files import atomic_folder
from components.core.progress import Progress
from components.core.task import KernelTask
from components.policy.checkpoint import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PER_TASK = 3
"""Demonstrations of one task: composing a task costs ten times a demonstration, and several styles on one prompt teach
that the style is free while the operators are not."""
TOKENIZER_CONVERSATIONS = 2000
MICROBATCHES = 4
"""Micro-batches of one step, of equal size: each is of one length, the step of several; on cpu two or one for each core."""


@dataclass(frozen=True)
class Corpus:
    """Tokenised conversations: `ids` and `action_mask` [tokens] end to end, conversation i in offsets[i] : offsets[i + 1]."""

    ids: Tensor
    action_mask: Tensor
    offsets: Tensor
    tokenizer: PreTrainedTokenizerBase

    def lengths(self) -> list[int]:
        return self.offsets.diff().tolist()

    def rows(self, which: list[int]) -> tuple[Tensor, Tensor]:
        """Ids and action_mask [rows, longest], padded on the right, where causal attention needs no mask."""
        spans = [slice(int(self.offsets[i]), int(self.offsets[i + 1])) for i in which]
        pad = int(self.tokenizer.pad_token_id)
        ids = torch.nn.utils.rnn.pad_sequence(
            [self.ids[span].long() for span in spans], batch_first=True, padding_value=pad
        )
        mask = torch.nn.utils.rnn.pad_sequence([self.action_mask[span] for span in spans], batch_first=True)
        return ids, mask


def make_corpus(params: Params, sources: Iterator[KernelTask], folder: Path, progress: Progress) -> None:
    """Write demonstrations of training tasks from `sources`, train the tokenizer on them, and store both in `folder`.

    Held-out tasks are skipped; UserError when the sources run dry.
    """
    settings = params.coldstart
    rng = random.Random(settings.seed)
    count = -(-settings.demonstrations // PER_TASK)
    conversations = []
    for number, task in enumerate(islice((task for task in sources if task.split == "train"), count)):
        conversations += [make_demonstration(task, rng, settings, params.device) for _ in range(PER_TASK)]
        if number % 500 == 0:
            progress.update("coldstart", 0, settings.steps, demonstrations=len(conversations))
    if len(conversations) < settings.demonstrations:
        raise UserError(
            f"coldstart.demonstrations: {settings.demonstrations} need {count} training tasks, the sources hold fewer; lower it."
        )
    rng.shuffle(conversations)
    sample = [message for conversation in conversations[:TOKENIZER_CONVERSATIONS] for message in conversation]
    tokenizer = train_tokenizer(sample, params.policy.vocabulary, params.policy.context)
    conversations = conversations[: settings.demonstrations]
    texts = sorted({text for conversation in conversations for text, _ in pieces(conversation)})
    tokens = dict(zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
    parts = [[(tokens[text], own) for text, own in pieces(conversation)] for conversation in conversations]
    parts = [
        conversation
        for conversation in parts
        if sum(len(ids) for ids, _ in conversation) <= params.policy.context
    ]
    if not parts:
        raise UserError(
            f"policy.context: no demonstration fits into {params.policy.context} tokens; raise it."
        )
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        tensors = {
            "ids": torch.tensor(
                [token for conversation in parts for ids, _ in conversation for token in ids],
                dtype=torch.int32,
            ),
            "action_mask": torch.tensor(
                [own for conversation in parts for ids, own in conversation for _ in ids], dtype=torch.bool
            ),
            "offsets": torch.tensor(
                [0, *(sum(len(ids) for ids, _ in conversation) for conversation in parts)]
            ).cumsum(0),
        }
        save_file(tensors, temporary / "tokens.safetensors")


def load_corpus(folder: Path) -> Corpus:
    return Corpus(**load_file(folder / "tokens.safetensors"), tokenizer=load_tokenizer(folder))


def plan_batches(
    lengths: list[int], *, steps: int, tokens_per_step: int, microbatches: int, seed: int
) -> list[list[list[int]]]:
    """The conversations of every step's micro-batches: plan[step][microbatch] lists indices into `lengths`.

    Every epoch is a new order. Conversations of like length share a micro-batch, which holds at most
    tokens_per_step / microbatches tokens with padding (and at least one conversation); which lengths meet in a step is
    left to chance.
    """
    rng = random.Random(seed)
    budget = tokens_per_step // microbatches
    batches: list[list[int]] = []
    while len(batches) < steps * microbatches:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        order.sort(key=lambda index: lengths[index])
        epoch: list[list[int]] = []
        current: list[int] = []
        for index in order:
            if current and (len(current) + 1) * lengths[index] > budget:
                epoch.append(current)
                current = []
            current.append(index)
        epoch.append(current)
        rng.shuffle(epoch)
        batches += epoch
    return [batches[step * microbatches : (step + 1) * microbatches] for step in range(steps)]
