"""When training stops early: signs that the policy has collapsed, and SIGTERM.

Collapse shows in the figures of a step before anything is learnt from it (paper, Fig. 5): entropy leaves its
band, answers run into the length limit, the sampler's distribution is no longer the trainer's, the critic
explains nothing.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from components.core.config import Ppo
from components.core.errors import StageFailed
from components.training.engine import World
from components.training.metrics_file import Figures

PATIENCE = 3
"""Steps in a row on which the critic must fail: its explained variance on one batch is noisy."""


class Collapsed(Exception):
    """The policy that sampled a step has collapsed; the message is one clause that says how."""


def collapse(ppo: Ppo, figures: Figures, earlier: Sequence[Mapping[str, float | None]]) -> str:
    """Return how the policy that sampled this step has collapsed, as one clause; empty when it has not.

    `earlier` holds the metrics of the steps before it.
    """
    entropy, truncated, share = (figures[name] for name in ("entropy", "truncated", "effective_share"))
    limit = ppo.min_explained_variance
    explained = [*(record.get("explained_variance") for record in earlier), figures["explained_variance"]]
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
    """A stage that ended because of SIGTERM with its state saved; the message is one sentence."""


class SigtermRequest:
    """Context in which SIGTERM only sets a flag, so that the running step can be finished and saved.

    Python delivers signals to the main thread alone; in any other thread the context changes nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self.previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.previous or signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def received_by_any(self, world: World) -> bool:
        """Return whether any rank received SIGTERM; collective."""
        return bool(world.sum(torch.tensor(float(self.received))) > 0)
