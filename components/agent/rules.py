"""The rule-based kernel writer as a policy: random schedules, of which the fastest that is right is kept.

It needs no model. It writes kernels for modules that are made of the tensor operators
(components/bootstrap/tensor_operators.py), however people write them, and none for other modules. Beside a
trained policy its figures show what measuring random schedules reaches, without any training.
"""

import asyncio
import functools
import random
from dataclasses import dataclass
from pathlib import Path

from components.agent.episode import Episode, RolloutRequest
from components.agent.in_flight import run_all
from components.agent.policies import Policy, with_policy_settings
from components.agent.tool_parser import parse_calls
from components.agent.trajectory import Trajectory
from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.demonstrations import MEASURE_CALL, draw_kernel, write_call
from components.core.files import digest_file, digest_json
from components.core.params import Params
from components.core.records import Device

# Folder of the source files on which the kernels depend.
RULES = Path(__file__).parents[1] / "bootstrap"
# The text of a turn without a kernel, which ends an episode.
NO_RULE = "No rule writes a kernel for this module."


@dataclass(frozen=True)
class _Writer:
    """The rules, which have a version as weights do: the beginning of the digest of their source files."""

    version: str


def rules_policy(params: Params, chosen: frozenset[str]) -> Policy:
    """Return the policy that writes kernels by rules, with a random schedule in each turn.

    `chosen` are the dotted keys of the parameters that the user has set, which keep their values.
    """
    params = with_policy_settings(params, {"prompt": "compact"}, chosen)
    digest = digest_json([digest_file(file) for file in sorted(RULES.glob("*.py"))])
    sample = functools.partial(_sample, writer=_Writer(digest[:16]))
    return Policy(
        "rules", digest[:16], digest, params, sample, lambda code: _draw(code, "cpu", 0) is not None
    )


def _draw(code: str, device: Device, seed: int) -> str | None:
    """Return a kernel for a module with a schedule that `seed` decides, or None if no rule writes one."""
    try:
        return draw_kernel(canonicalize(code) or code, device, random.Random(seed))
    except ValueError:
        return None


def _sample(request: RolloutRequest, writer: _Writer) -> list[Trajectory]:
    async def run(index: int) -> Trajectory:
        return await (await asyncio.to_thread(_RuleEpisode, request, index, writer)).run()

    return run_all(len(request.tasks), run, on_progress=request.on_progress, stop=request.stop)


class _RuleEpisode(Episode):
    """Episode (one attempt at a task) whose turns write and measure kernels with random schedules.

    The last of several turns writes the best of them again.
    """

    # The milestone and the speed-up over eager mode of the best kernel so far, and its text.
    best: tuple[int, float, str] = (-2, 0.0, "")

    async def take_turn(self) -> None:
        """Write a kernel, and measure it if there are more turns."""
        device, turn = self.params.device, len(self.turns)
        is_last = turn == self.request.max_turns - 1
        seed = self.request.turn_seed(self.index, turn)
        kernel = self.best[2] if turn and is_last else _draw(self.task.code, device, seed)
        text = "" if kernel is None else write_call(kernel, device) + ("" if is_last else f"\n{MEASURE_CALL}")
        await asyncio.to_thread(self.perform, text or NO_RULE, parse_calls(text), cut=False)
        if kernel is not None and not is_last and self.tools.verdicts:
            verdict = self.tools.verdicts[-1]
            eager = verdict.speedup.eager
            self.best = max(self.best, (verdict.milestone, eager.estimate if eager else 0.0, kernel))
