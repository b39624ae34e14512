"""The experiment of docs/measurements/results.md: what each stage adds on held-out tasks, by seed; ablations.

    python tests/bench/experiment.py OUT [--profile cpu] [--seeds 0,1,2] [--variants NAME,NAME] \
        [--schedules N] [--set KEY=VALUE] [--part PART] [--table] [--plot FILE.svg]

Every seed has its own cold start and stages 1 to 4 on one data set. A policy is evaluated after the cold
start and after each stage that changes it, at temperatures 0 and 1. Each of `--variants` is a run of every
seed that leaves out a stage or has another value of a parameter of stage 4. It shares the stages before the
difference with the full run, and is evaluated at temperature 1. `--schedules` judges N random schedules on
the held-out tasks once, and adds what share of their speed-up the first answers reach to the tables. The
tables of differences compare each row with the full run over all seeds.

A repeated call goes on where the last one was stopped, and calls with other seeds can run at the same time in
folders of their own; `--table` prints what there is, and `--plot` draws it. On a host with two GPUs a call
with `--part training` and another with `--part evaluation`, which waits for each checkpoint, share the work,
each with its own CUDA_VISIBLE_DEVICES and, by taskset, its own cores.
"""

import argparse
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiment_tables import ATTAINABLE, FULL, TEMPERATURES, at, difference_table, plot, row, table
from schedule_search import search

from components.agent.policies import checkpoint_policy
from components.agent.trajectory import Trajectory
from components.bootstrap.cold_start import coldstart
from components.core.config import PROJECT, resolve
from components.core.files import MANIFEST
from components.core.params import Params
from components.evaluation.evaluate import evaluate
from components.evaluation.suites import load_suite
from components.judge.pool.local_pool import LocalPool
from components.judge.pool.open_pool import open_pool
from components.synthesis.core_composer import compose_training_tasks
from components.training.run_stage import run_stage, stages_of_run
from components.training.stage import CHECKPOINT, Stage, StageName

TASKS = "tasks"


@dataclass(frozen=True)
class Variant:
    """A run that leaves out stages, or that has other parameters in stage 4."""

    sets: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


VARIANTS = {
    "without-stage-1": Variant(without=("warmup",)),
    "without-stage-2": Variant(without=("rejection",)),
    "without-stage-3": Variant(without=("critic",)),
    "one-turn": Variant(("agentic.rollouts.max_turns=1",)),
    "log-speedup": Variant(("reward=experiment.log_speedup",)),
    "group": Variant(("agentic.advantages=group",)),
    "staleness": Variant(("agentic.staleness=2",)),
}


def log_speedup(trajectory: Trajectory) -> float:
    """Return log2(1 + s) of the speed-up s over eager mode, or -1 if the final kernel is not correct."""
    speedup = trajectory.final.speedup.eager if trajectory.final.status == "correct" else None
    return -1.0 if speedup is None else math.log2(1 + speedup.estimate)


class Lines:
    """Progress as plain lines: the experiment runs for an hour without a terminal."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        if "episodes" not in figures and (step == total or stage in ("warmup", "agentic")):
            shown = " ".join(f"{name} {value:.3g}" for name, value in figures.items())
            print(f"{time.monotonic() - self.began:6.0f} s  {stage} {step}/{total} {shown}", flush=True)


@dataclass
class Experiment:
    out: Path
    profile: str
    sets: tuple[str, ...]
    part: str
    pool: LocalPool

    def params(self, seed: int, *more: str) -> Params:
        return resolve(self.profile, (f"seed={seed}", f"coldstart.seed={seed}", *self.sets, *more)).params

    def evaluated(
        self, name: str, policy: Path, seed: int, temperatures: tuple[int, ...] = TEMPERATURES
    ) -> None:
        """Evaluate a policy at each of the temperatures.

        Equal kernels of the policies of one seed share a measurement, which reduces the noise of differences.
        """
        if self.part == "training":
            return
        await_file(policy / MANIFEST)
        for temperature in temperatures:
            params, folder = self.params(seed, f"evaluation.temperature={temperature}"), at(name, temperature)
            print(f"evaluating {folder}", flush=True)
            found = evaluate(
                checkpoint_policy(policy, params),
                load_suite(params, self.out / TASKS),
                self.pool,
                self.out / folder,
                epoch=f"evaluation {seed}",
                progress=Lines(),
                seed=params.seed,
            )
            print(row(name, found), flush=True)

    def search(self, seed: int, schedules: int) -> None:
        """Judge random schedules on the held-out tasks, each correct kernel twice."""
        params, out = self.params(seed), self.out / ATTAINABLE
        if self.part != "training":
            suite = load_suite(params, self.out / TASKS)
            search(suite, params, self.pool, out, schedules=schedules, epoch=ATTAINABLE, progress=Lines())

    def stage(
        self,
        name: StageName,
        place: str,
        params: Params,
        actor: Path,
        critic: Path | None = None,
        sampled: tuple[str, ...] = (),
    ) -> Path:
        out, tasks = self.out / place, self.out / TASKS
        folders = tuple(self.out / earlier / "trajectories" for earlier in sampled)
        if self.part != "evaluation":
            run_stage(
                Stage(name, params, actor, tasks, out, self.pool, Lines(), "experiment", critic, folders)
            )
        return out / CHECKPOINT

    def cold(self, seed: int) -> Path:
        params, out = self.params(seed), self.out / f"{seed} cold start"
        if params.coldstart.language_model:
            return self.stage("coldstart", out.name, params, Path(params.policy.source))
        if self.part != "evaluation" and not (out / MANIFEST).is_file():
            tasks = compose_training_tasks(seed, params.data, params.device)
            coldstart(params, tasks, out, dataset="", code="experiment", progress=Lines())
        return out

    def run(self, seed: int, name: str) -> None:
        """Train and evaluate the full run of a seed, or the variant with the name `name`."""
        variant = VARIANTS.get(name, Variant())
        params, changed = self.params(seed), self.params(seed, *variant.sets)
        actor, place = self.cold(seed), str(seed)
        if name == FULL:
            self.evaluated(f"{seed} cold start", actor, seed)
        sampled = []
        before: tuple[StageName, ...] = ("warmup", "rejection")
        for number, stage in enumerate(before, start=1):
            if stage in variant.without:
                place = f"{seed} {name}"
                continue
            sampled.append(f"{place} {stage}")
            actor = self.stage(stage, sampled[-1], params, actor)
            if name == FULL:
                self.evaluated(f"{seed} stage {number}", actor, seed)
        if "critic" in variant.without:
            # Stage 1's code makes a critic from the actor, and does not train it before the first update.
            fresh = changed.model_copy(update={"warmup": changed.agentic})
            actor = self.stage("warmup", f"{seed} {name} agentic", fresh, actor)
        else:
            critic = None
            if "critic" in stages_of_run(changed):
                critic = self.stage("critic", f"{place} critic", params, actor, sampled=tuple(sampled))
            actor = self.stage("agentic", f"{seed} {name} agentic", changed, actor, critic)
        self.evaluated(f"{seed} {name}", actor, seed, TEMPERATURES if name == FULL else TEMPERATURES[1:])


def await_file(file: Path) -> None:
    """Another call of the experiment makes it, and writes it last."""
    while not file.is_file():
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--seeds", default="0,1,2")
    names = ",".join(VARIANTS)
    parser.add_argument("--variants", default="", help=f"any of {names}")
    parser.add_argument("--schedules", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--part", choices=("all", "training", "evaluation"), default="all")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    out, seeds = chosen.out.resolve(), [int(seed) for seed in chosen.seeds.split(",")]
    variants = [name for name in chosen.variants.split(",") if name]
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} is unknown; give any of {names}")
    if not chosen.table and not chosen.plot:
        if chosen.part == "evaluation":
            await_file(out / TASKS / "tasks.parquet")
        else:
            command = [sys.executable, "-m", "components.cli", "data", "build", "--profile", chosen.profile]
            command += ["--home", str(out / "home"), "--out", str(out / TASKS)]
            command += [word for value in chosen.sets for word in ("--set", value)]
            subprocess.run(command, check=True, cwd=PROJECT)
        verdicts = "verdicts of evaluations" if chosen.part == "evaluation" else "verdicts"
        trains = chosen.part != "evaluation"
        pool = open_pool(resolve(chosen.profile, tuple(chosen.sets)).params, out / verdicts, trains=trains)
        experiment = Experiment(out, chosen.profile, tuple(chosen.sets), chosen.part, pool)
        try:
            if chosen.schedules:
                experiment.search(seeds[0], chosen.schedules)
            for seed in seeds:
                for name in (FULL, *variants):
                    experiment.run(seed, name)
        finally:
            pool.close()
    for temperature in TEMPERATURES:
        table(out, seeds, VARIANTS, temperature)
        difference_table(out, seeds, VARIANTS, temperature)
    if chosen.plot:
        plot(out, seeds, chosen.plot)


if __name__ == "__main__":
    main()
