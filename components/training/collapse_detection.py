"""This module detects the two reasons to stop training early: a collapsed policy, and SIGTERM.

The metrics of a step show a collapse before the step's updates are made (CUDA Agent paper, Fig. 5): the
entropy is too high or too low, too many answers reach the length limit, the sampler's probabilities differ
too much from the trainer's, or the critic explains too little of the returns.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from components.core.errors import StageFailed
from components.core.stage_params import Ppo
from components.training.launcher import TERMINATED
from components.training.metrics_file import Figures
from components.training.ranks import World

# Number of successive steps with a low explained variance that make a collapse. It is more than 1 because the
# explained variance of a single batch is noisy.
PATIENCE = 3


class Collapsed(Exception):
    """Error raised if the policy that sampled a step's trajectories has collapsed.

    The message is a clause, such as "entropy is not a number", which the training loop puts into a sentence.
    """


def collapse(ppo: Ppo, figures: Figures, earlier: Sequence[Mapping[str, float | None]]) -> str:
    """Return a clause that states how the policy has collapsed, such as "entropy is not a number", or "".

    `figures` are the metrics of the step whose trajectories the policy sampled, and `earlier` are the metrics
    of the steps before it. Steps without a critic have no explained variance. The result is "" if the policy
    has not collapsed.
    """
    entropy, truncated, share = (figures[name] for name in ("entropy", "truncated", "effective_share"))
    limit = ppo.min_explained_variance
    explained = [*(record.get("explained_variance") for record in earlier), figures.get("explained_variance")]
    last = [value for value in explained[-PATIENCE:] if value is not None and math.isfinite(value)]
    signs = [
        (not math.isfinite(entropy), "entropy is not a number"),
        (
            entropy > ppo.max_entropy,
            f"entropy {entropy:.2f} nats is above max_entropy {ppo.max_entropy:g}",
        ),
        (
            entropy < ppo.min_entropy,
            f"entropy {entropy:.4f} nats is below min_entropy {ppo.min_entropy:g}",
        ),
        (
            truncated > ppo.max_truncated,
            f"length-clipped share {truncated:.2f} is above max_truncated {ppo.max_truncated:g}",
        ),
        (
            share < ppo.min_effective_share,
            "importance weights between sampler and trainer leave an effective share of "
            f"{share:.2f} of the tokens, below min_effective_share {ppo.min_effective_share:g}",
        ),
        (
            limit is not None and len(last) == PATIENCE and max(last) < limit,
            f"explained variance was below min_explained_variance {limit} on {PATIENCE} steps in a row",
        ),
    ]
    return next((clause for collapsed, clause in signs if collapsed), "")


class Terminated(StageFailed):
    """Error raised when a stage has saved its state and ends because of SIGTERM.

    The message is one sentence.
    """

    exit_code = TERMINATED


@contextmanager
def sigterm_deferred() -> Iterator[Callable[[World], bool]]:
    """Return a context in which SIGTERM only sets a flag, so that the running step can end and be saved.

    The yielded function returns whether any rank received SIGTERM; every rank must call it. Python handles
    signals only in the main thread; in any other thread the context changes nothing.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number)) if is_main else None
    try:
        yield lambda world: bool(world.sum(torch.tensor(float(bool(received)))) > 0)
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
