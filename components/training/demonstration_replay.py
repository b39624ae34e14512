"""Tasks and demonstrations of the same kind as those on which the cold start trains a policy from scratch.

A demonstration is a conversation in which a kernel for a composed task is written by rules
(`components.bootstrap.demonstrations`). Rejection fine-tuning mixes demonstrations into its batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import encode_conversations
from components.core.params import Params
from components.core.task import KernelTask
from components.policy.checkpoint import load_tokenizer

if TYPE_CHECKING:
    from components.training.rejection import Row


def training_sources(params: Params, seed: int) -> Iterator[KernelTask]:
    """Return an endless iterator of tasks that chain torch operators, for training only.

    The tasks depend on `seed`. Tasks whose operator sequence is held out for evaluation are left out.
    """
    from components.synthesis.compose import compose_tasks, is_held_out

    tasks = compose_tasks(seed, params.data, params.device)
    return (task for task in tasks if not is_held_out(task.ops, params.data.held_out_seed))


def demonstrations(params: Params, policy: Path) -> Callable[[int], list[Row]] | None:
    """Return a function that takes a count and returns that many demonstrations of the cold start's kind.

    Each demonstration is a pair of token ids and action mask. Equal counts give equal demonstrations. Their
    tasks are not those of the cold start. `policy` is the folder of the checkpoint whose tokenizer encodes
    them. Returns None if the policy does not descend from a cold start (`policy.source`).
    """
    if params.policy.source not in ("scratch", "champion"):
        return None

    def rows(count: int) -> list[Row]:
        tokenizer, rng = load_tokenizer(policy), random.Random(params.coldstart.seed)
        # With another seed the tasks differ from the tasks of the cold start.
        sources = islice(training_sources(params, params.coldstart.seed + 1), count)
        conversations = (
            make_demonstration(source, rng, params.coldstart, params.device) for source in sources
        )
        return list(encode_conversations(tokenizer, conversations))

    return rows
