"""When a stage stops itself, and when a person asks it to.

Collapse shows in the figures of a step before anything is learnt from it (paper, Fig. 5): entropy leaves its band, answers
run into the length limit, the sampler's distribution is no longer the trainer's, the critic explains nothing. The stage
then goes back to the last good weights and says why.
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
from components.training.stage import Figures

PATIENCE = 3
"""Steps in a row on which the critic must fail: its explained variance on one batch is noise."""
KEPT = "the last good weights were kept"


def collapse(ppo: Ppo, figures: Figures, earlier: Sequence[Mapping[str, float | None]]) -> str:
    """Why the policy that sampled this step has collapsed; empty when it has not. `earlier` holds the steps before it."""
    if not math.isfinite(figures["entropy"]):
        return f"entropy is not a number; {KEPT}"
    if figures["entropy"] > ppo.max_entropy:
        return f"entropy {figures['entropy']:.2f} nats is above max_entropy {ppo.max_entropy:g}; {KEPT}"
    if figures["entropy"] < ppo.min_entropy:
        return f"entropy {figures['entropy']:.4f} nats is below min_entropy {ppo.min_entropy:g}; {KEPT}"
    if figures["truncated"] > ppo.max_truncated:
        return f"length-clipped share {figures['truncated']:.2f} is above max_truncated {ppo.max_truncated:g}; {KEPT}"
    if figures["effective_share"] < ppo.min_effective_share:
        return (
            f"importance weights between sampler and trainer leave an effective share of {figures['effective_share']:.2f} of the tokens, "
            f"below min_effective_share {ppo.min_effective_share:g}; {KEPT}"
        )
    if ppo.min_explained_variance is not None:
        last = [*(record.get("explained_variance") for record in earlier), figures["explained_variance"]][
            -PATIENCE:
        ]
        defined = [value for value in last if value is not None and math.isfinite(value)]
        if len(defined) == PATIENCE and max(defined) < ppo.min_explained_variance:
            return f"explained variance was below min_explained_variance {ppo.min_explained_variance:g} on {PATIENCE} steps in a row; {KEPT}"
    return ""


class Terminated(StageFailed):
    """A stage that ended because of SIGTERM, its state saved: one sentence."""


class Termination:
    """While it is entered, SIGTERM is a request: the stage ends after its current update, at a saved state.

    Signals reach the main thread only; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.received = False
        self.previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.previous or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def asked(self, world: World) -> bool:
        """Whether any rank was asked; collective."""
        return bool(world.sum(torch.tensor(float(self.received))) > 0)
