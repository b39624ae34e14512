"""What the agent's loop itself costs a turn, without model and judge, and whether 64 trajectories go on fairly.

A policy that says a prepared text writes a kernel and measures it, turn after turn; the judge answers at once. What is
left is the loop: histories, parsing, tools, observations, records.

    python tests/bench/bench_loop.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_world import MEASURE, TASK, Script, World, call, params, tokenizer, write

from components.agent.loop import run_episodes

TURNS = 20


def milliseconds_a_turn(count: int, shell: bool) -> tuple[float, float]:
    """CPU and wall milliseconds of one turn of one trajectory."""
    words = tokenizer(1 << 16)
    command = "cat model.py | wc -l" if shell else MEASURE
    script = Script(words, lambda i, t: f"{write(1.0 + t)}\n{call('Bash', command=command)}")
    more = {"pool": World(), "epoch": "bench", "seed": 0, "max_turns": TURNS, "max_new_tokens": 512, "temperature": 1.0}
    cpu, wall = time.process_time(), time.perf_counter()
    trajectories = run_episodes([TASK] * count, params=params(context=1 << 16), sampler=script, tokenizer=words, **more)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert all(len(trajectory.turns) == TURNS for trajectory in trajectories)
    return cpu / count / TURNS * 1e3, wall / count / TURNS * 1e3


def main() -> None:
    milliseconds_a_turn(1, False)
    for count in (1, 64):
        for shell in (False, True):
            cpu, wall = milliseconds_a_turn(count, shell)
            print(f"{count:>3} trajectories, {'a command in the shell' if shell else 'write and measure':<22}: {cpu:6.2f} ms CPU, {wall:6.2f} ms wall a turn")


if __name__ == "__main__":
    main()
