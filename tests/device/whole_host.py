"""The whole pipeline on all devices of one host, as a table: seconds, tokens/s and idle shares of each stage.

    PYTHONPATH=. python tests/device/whole_host.py --out FOLDER [--profile hf] [--gpus N] [--cpus N]
        [--set KEY=VALUE]...

Starts a Ray cluster of one node, and runs `cuda-agent run` on it once with `SMALL`, which makes the profile
small: two steps of both stages of PPO, and an evaluation on ten held-out tasks. `--set` replaces these and
other parameters. The profile hf needs 8 GPUs, a model of 8B in models/policy and a checkout of KernelBench in
the working directory. Fewer GPUs and another model are chosen by `--gpus 2 --set pool.trainers=1 --set
pool.samplers=1 --set pool.judges=0 --set policy.source=models/smollm2`, and processor cores by `--profile ci
--cpus 4 --set pool.trainers=2 --set pool.judges=1`. The same command continues in FOLDER.

Prints the exit code, the seconds of the run and of each stage, the figures of the last step of each stage,
and the largest memory in use of each GPU. Ends with the exit code of the run.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

SMALL = {
    "data.tasks": 12,
    "data.held_out": 10,
    "coldstart.demonstrations": 600,
    "coldstart.steps": 10,
    "warmup.steps": 2,
    "warmup.critic_warmup_steps": 0,
    "warmup.rollouts.tasks": 6,
    "rejection.rollouts.tasks": 6,
    "agentic.steps": 2,
    "agentic.rollouts.tasks": 6,
    # A model that has learned little is no reason to stop here.
    "rejection.min_kept": 0,
    **{
        f"{stage}.{name}": value
        for stage in ("warmup", "agentic")
        for name, value in (("min_updates", 0), ("max_entropy", 100), ("max_truncated", 1))
    },
    "evaluation.suite": "held-out",
    "evaluation.levels": "[]",
}
# Figures of the last step of a stage, as its metrics name them.
FIGURES = (
    *("reward", "seconds", "seconds_rollout", "seconds_critic", "seconds_actor"),
    *("tokens_per_second_rollout", "tokens_per_second_actor", "idle_sampler", "idle_judge", "idle_trainer"),
)


class GpuMemory(threading.Thread):
    """Thread that asks nvidia-smi every second for the memory in use of each GPU, and keeps the largest.

    `mebibytes` stays empty where there is no GPU.
    """

    QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mebibytes: list[int] = []

    def run(self) -> None:
        """Ask until nvidia-smi fails or is missing."""
        try:
            while True:
                answer = subprocess.run(self.QUERY, capture_output=True, text=True, check=True).stdout
                found = [int(line) for line in answer.split()]
                self.mebibytes = [max(pair) for pair in zip(found, self.mebibytes or found, strict=True)]
                time.sleep(1)
        except (OSError, subprocess.CalledProcessError):
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="hf")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    memory, started = GpuMemory(), time.monotonic()
    memory.start()
    given = {"num_gpus": options.gpus, "num_cpus": options.cpus}
    resources = {name: number for name, number in given.items() if number is not None}
    cluster = Cluster()
    try:
        cluster.add_node(include_dashboard=False, **resources)
        code = run_pipeline(options, cluster.address)
    finally:
        cluster.shutdown()
    print(f"exit code {code} after {time.monotonic() - started:.0f} s")
    print_stages(options.out / "home")
    for index, mebibytes in enumerate(memory.mebibytes):
        print(f"gpu {index}: {mebibytes / 1024:.1f} GiB at most")
    return code


def run_pipeline(options: argparse.Namespace, address: str) -> int:
    """Run the pipeline on the Ray cluster at `address`, print its progress, and return its exit code."""
    sets = [f"{key}={value}" for key, value in SMALL.items()] + options.set
    command = [sys.executable, "-m", "components.cli", "run", "--profile", options.profile]
    command += ["--home", str(options.out / "home"), *(word for one in sets for word in ("--set", one))]
    return subprocess.run(["env", f"RAY_ADDRESS={address}", *command], check=False).returncode


def print_stages(home: Path) -> None:
    """Print the seconds of each stage in the home, oldest first, and the figures of its last step."""
    for folder in sorted((home / "stages").iterdir(), key=lambda folder: folder.stat().st_mtime):
        stage, metrics = read(folder / "stage.json"), folder / "metrics.jsonl"
        last = json.loads(metrics.read_text().splitlines()[-1]) if metrics.exists() else {}
        seconds = stage.get("seconds", read(folder / "record.json").get("seconds"))
        figures = "  ".join(f"{name} {last[name]:.4g}" for name in FIGURES if name in last)
        print(f"{folder.name:30} {seconds if seconds is None else round(seconds)} s  {figures}")


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dictionary if the stage has not written it."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
