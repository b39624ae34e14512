"""Stage 4 with trainer and judge on one GPU and vLLM on another: staleness, and processes that are killed.

    python tests/device/two_gpus.py INPUT DATASET OUT [--profile smollm2] [--staleness 0 2] [--kills]
        [--vllm FILE] [--set KEY=VALUE]...

INPUT is a policy that has learned to call its tools, such as a checkpoint of the cold start, and DATASET a
folder with tasks.parquet. Stage 4 is run once with each staleness, with group advantages and the parameters
`SMALL`, which `--set` replaces. One line for each: the seconds of all steps but the first one, which starts
the server and prepares the tasks; steps an hour; the mean reward of these steps, with a 95 % interval over
steps; the share of the time for which sampler, judge and trainer were idle; and the mean age of the tokens.

With --kills, another run of three steps loses its vLLM server, then the judge's processes that hold torch,
and at last itself, each by SIGKILL after some trajectories were finished, and is started again. It must go on
after the first two. Then every trajectory that was finished and judged before a kill must have been trained
on once, unchanged. Ends with 1 otherwise.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SMALL = (
    *(
        "agentic.advantages=group",
        "agentic.steps=10",
        "agentic.rollouts.tasks=4",
        "agentic.rollouts.samples=6",
    ),
    *("agentic.min_updates=0", "pool.samplers=1", "policy.servers=[]", "policy.weight_transfer=nccl"),
)
IDLE = ("idle_sampler", "idle_judge", "idle_trainer")
# Words in the command line of a process that is killed, the trainer itself last.
VICTIMS = {"vLLM server": (b"vllm", b"serve"), "judge": (b"zygote.py",), "trainer": ()}
# Number of trajectories that are finished between two kills.
BETWEEN = 8


def start(arguments: argparse.Namespace, out: Path, *sets: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "components.cli", "train", "agentic", "--profile", arguments.profile]
    command += ["--input", arguments.input, "--dataset", arguments.dataset, "--output", str(out)]
    command += ["--home", str(arguments.out / "home")]
    vllm = (f"policy.vllm={arguments.vllm}",) if arguments.vllm else ()
    for one in (*SMALL, *vllm, *arguments.sets, *sets):
        command += ["--set", one]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, cwd=PROJECT, stdout=log, stderr=log)


def row(staleness: int, out: Path) -> str:
    """Return the line of the table for a finished stage in the folder `out`."""
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    seconds = sum(step["seconds"] for step in steps)
    rewards = [step["reward"] for step in steps]
    half = 1.96 * statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan
    idle = [f"{sum(step[name] for step in steps) / seconds:.0%}" for name in IDLE]
    age = statistics.mean(step.get("age", 0.0) for step in steps)
    mean = statistics.mean(rewards)
    return (
        f"{staleness:<10}{len(steps):>6}{seconds:>9.0f}{3600 * len(steps) / seconds:>12.1f}   "
        f"{mean:.2f} [{mean - half:.2f}, {mean + half:.2f}]   {'  '.join(idle)}   {age:.2f}"
    )


def finished(out: Path) -> dict[str, bytes]:
    """Return the contents of all finished trajectories of the stage in the folder `out`, by attempt.

    Those on which the judge failed are left out, because a stage that is started again repeats them.
    """
    found = {}
    # Names that begin with a dot are of folders that are still written. A trajectory may move meanwhile.
    for pattern in ("sampling/[0-9]*/trajectories.jsonl", "trajectories/*/[0-9]*/trajectories.jsonl"):
        for place in out.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                content = place.read_bytes()
                if json.loads(content)["reward"] is not None:
                    found[place.parent.name] = content
    return found


def kill(words: tuple[bytes, ...], trainer: subprocess.Popen[bytes]) -> int:
    """Kill the trainer's descendants whose command line has all `words`, or the trainer if there are none.

    Returns how many were killed, which is 0 if the trainer has ended.
    """
    if trainer.poll() is not None:
        return 0
    if not words:
        trainer.kill()
        return 1
    parents, commands = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(place.name)] = (place / "cmdline").read_bytes()
        except OSError:
            continue
    chosen = []
    for process, command in commands.items():
        ancestor = process
        while ancestor not in (0, 1, trainer.pid):
            ancestor = parents.get(ancestor, 0)
        if ancestor == trainer.pid and process != trainer.pid and all(word in command for word in words):
            chosen.append(process)
    for process in chosen:
        with contextlib.suppress(ProcessLookupError):  # it ended with another one
            os.kill(process, signal.SIGKILL)
    return len(chosen)


def survive(arguments: argparse.Namespace, out: Path) -> bool:
    """Run three steps of stage 4 in `out`, kill its processes one after the other, and check what is left."""
    process, begun, kept = start(arguments, out, "agentic.steps=3"), time.monotonic(), dict[str, bytes]()
    is_killed = True
    for number, (name, words) in enumerate(VICTIMS.items(), 1):
        while len(finished(out)) < number * BETWEEN and process.poll() is None:
            time.sleep(0.2)
        kept |= finished(out)
        killed = kill(words, process)
        is_killed = is_killed and killed > 0
        print(f"{time.monotonic() - begun:6.0f} s: {len(kept)} finished, {killed} killed: {name}", flush=True)
        if not words:
            process.wait()
            process = start(arguments, out, "agentic.steps=3")
    code = process.wait()
    trained = Counter(place.name for place in out.glob("trajectories/*/*"))
    missing = [name for name in kept if name not in trained]
    changed = [name for name, content in finished(out).items() if kept.get(name, content) != content]
    twice = [name for name, count in trained.items() if count > 1]
    print(
        f"{time.monotonic() - begun:6.0f} s: exit code {code}, {len(trained)} trained on; of the finished "
        f"{len(missing)} are missing, {len(changed)} changed; {len(twice)} trained twice",
        flush=True,
    )
    return is_killed and not (code or missing or changed or twice or not trained)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input")
    parser.add_argument("dataset")
    parser.add_argument("out", type=lambda name: Path(name).resolve())
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--staleness", nargs="*", type=int, default=[0, 2])
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--vllm", help="vllm executable of the environment of vLLM")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    good = True
    if arguments.staleness:
        print(
            "staleness  steps  seconds  steps/hour   reward   idle: sampler, judge, trainer   age", flush=True
        )
    for staleness in arguments.staleness:
        out = arguments.out / f"staleness-{staleness}"
        if code := start(arguments, out, f"agentic.staleness={staleness}").wait():
            print(f"staleness {staleness}: exit code {code}; see {out.with_suffix('.log')}", flush=True)
            good = False
        else:
            print(row(staleness, out), flush=True)
    if arguments.kills:
        good = survive(arguments, arguments.out / "killed") and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
