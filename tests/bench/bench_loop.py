"""Cost of the agent's loop per turn, without model and judge, and fairness of 64 trajectories.

A policy that says prepared turns writes a kernel and measures it, turn after turn; the judge answers at
once. What is left is the loop: histories, parsing, tools, observations, records. The shell's own CPU time
is not counted, and in memory its folder costs no disk.

    TMPDIR=/dev/shm python tests/bench/bench_loop.py
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from agent_fixtures import MEASURE, TASK, ScriptedPool, ScriptedSampler, call, params, tokenizer, write

from components.agent.episode import RolloutRequest, run_episodes
from components.policy.sampler import Completion, complete_all

TURNS = 20
REPEATS = 5
PARAMS = params(context=1 << 16)
TOKENIZER = tokenizer(1 << 16)


class Prepared:
    """A sampler that has its turns ready: encoding them is the model's part."""

    version = "prepared"

    def __init__(self, command: str):
        script = ScriptedSampler(TOKENIZER, lambda i, t: f"{write(1.0 + i)}\n{call('Bash', command=command)}")
        self.said = complete_all(script, [[]] * TURNS, max_new_tokens=512, temperature=1.0, seed=0)
        # Number of turns that were sampled of each session.
        self.turns: Counter[str] = Counter()

    def capacity(self) -> int:
        return 64

    async def complete(self, prompt: Sequence[int], *, session: str, **_: Any) -> Completion:
        self.turns[session] += 1
        return self.said[self.turns[session] - 1]


def milliseconds_a_turn(count: int, shell: bool) -> tuple[float, float]:
    """CPU and wall milliseconds of one turn of one trajectory."""
    policy = Prepared("cat model.py | wc -l" if shell else MEASURE)
    request = RolloutRequest(
        tasks=[TASK] * count,
        params=PARAMS,
        pool=ScriptedPool(),
        epoch="bench",
        seed=0,
        max_turns=TURNS,
        max_new_tokens=512,
        temperature=1.0,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    trajectories = run_episodes(request, policy, TOKENIZER)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert all(len(trajectory.turns) == TURNS for trajectory in trajectories)
    return cpu / count / TURNS * 1e3, wall / count / TURNS * 1e3


def main() -> None:
    milliseconds_a_turn(1, False)
    for count in (1, 64):
        for shell in (False, True):
            cpu, wall = zip(*sorted(milliseconds_a_turn(count, shell) for _ in range(REPEATS)), strict=True)
            what = "a command in the shell" if shell else "write and measure"
            print(
                f"{count:>3} trajectories, {what:<22}: {cpu[REPEATS // 2]:.2f} ms CPU ({cpu[0]:.2f} to"
                f" {cpu[-1]:.2f}), {sorted(wall)[REPEATS // 2]:.2f} ms wall a turn"
            )


if __name__ == "__main__":
    main()
