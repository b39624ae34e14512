"""The experiment of docs/results.md: what each stage adds on held-out tasks, by seed, and ablations.

    python tests/bench/experiment.py OUT [--profile cpu] [--seeds 0,1,2] [--no-ablations] \
        [--variants group,turns,staleness,log] [--schedules N] [--set KEY=VALUE] [--part PART] [--table] \
        [--plot FILE.svg]

Every seed has its own cold start and stages 1 to 4 on one data set; a policy is evaluated after the cold
start and after each stage that changes it. The paper's ablations in miniature share the first seed's cold
start. `--variants` instead trains stage 4 of every seed with another value of agentic.advantages, staleness
or reward, and makes only what that needs. `--schedules` judges N random schedules on the held-out tasks once,
and adds what share of their speed-up the first answers reach to the table. A repeated call goes on where the
last one was stopped; `--table` prints what there is, and `--plot` draws it. On a host with two GPUs a call
with `--part training` and another with `--part evaluation`, which waits for each checkpoint, share the work,
each with its own CUDA_VISIBLE_DEVICES and, by taskset, its own cores.
"""

import argparse
import itertools
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from components.agent.policies import checkpoint_policy
from components.bootstrap.cold_start import coldstart
from components.core.config import PROJECT, resolve
from components.core.files import MANIFEST, read_json
from components.core.params import Params
from components.evaluation.attainable import search
from components.evaluation.captured_share import (
    Attainable,
    equivalence_text,
    gain_text,
    share_rows,
    share_text,
)
from components.evaluation.charts import HEIGHT, WIDTH, Series, line_chart
from components.evaluation.evaluate import evaluate
from components.evaluation.metrics import RESULTS, Evaluation, changes, load_evaluation
from components.evaluation.suites import load_suite
from components.judge.open_pool import open_pool
from components.judge.pool import LocalPool
from components.training.demonstration_replay import training_sources
from components.training.run_stage import run_stage
from components.training.stage import CHECKPOINT, Stage, stages_of_run

TASKS = "tasks"
ATTAINABLE = "attainable"
FULL = ("cold start", "stage 1", "stage 2", "stage 4")
NUMBERS = (0, 1, 2, 4)
COLOURS = {"first": "#2563eb", "second": "#d97706", "third": "#059669"}
STYLE = (
    "text { font: 11px sans-serif; fill: #444 } .middle { text-anchor: middle } .end { text-anchor: end }"
    " .grid { stroke: #ddd } .axis { stroke: #444 } "
    + (
        ".line { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 5 4 } .band { opacity: .16 }"
        + "".join(
            f" .line.{name} {{ stroke: {code} }} .dot.{name}, .band.{name} {{ fill: {code} }}"
            for name, code in COLOURS.items()
        )
    )
)
# Values of stage 4 with which `--variants` trains it, by the name of the variant.
VARIANTS = {
    "group": "agentic.advantages=group",
    "turns": "agentic.advantages=turns",
    "staleness": "agentic.staleness=2",
    "log": "agentic.reward=log_speedup",
}
ABLATIONS = (
    "without stage 1",
    "without stage 2",
    "without stage 3",
    "bare speed-up as reward",
    "logarithm of the speed-up as reward",
    "tasks by solve rate",
    "stage 1, one turn",
)


class Lines:
    """Progress as plain lines: the experiment runs for an hour without a terminal."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        if step == total or stage in ("warmup", "agentic"):
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

    def evaluated(self, name: str, policy: Path, params: Params) -> None:
        if self.part == "training":
            return
        folder = self.out / f"evaluation {name}"
        await_file(policy / MANIFEST)
        print(f"evaluating {name}", flush=True)
        suite = load_suite(params, self.out / TASKS)
        found = evaluate(
            checkpoint_policy(policy, params),
            suite,
            self.pool,
            folder,
            epoch=folder.name,
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
        name: str,
        place: str,
        params: Params,
        actor: Path,
        critic: Path | None = None,
        sampled: tuple[str, ...] = (),
    ) -> Path:
        out = self.out / place
        folders = tuple(self.out / earlier / "trajectories" for earlier in sampled)
        if self.part != "evaluation":
            run_stage(
                Stage(
                    name,
                    params,
                    actor,
                    self.out / TASKS,
                    out,
                    self.pool,
                    Lines(),
                    "experiment",
                    critic,
                    folders,
                )
            )
        return out / CHECKPOINT

    def cold(self, seed: int) -> Path:
        params, out = self.params(seed), self.out / f"{seed} cold start"
        if self.part != "evaluation" and not (out / MANIFEST).is_file():
            coldstart(
                params, training_sources(params, seed), out, dataset="", code="experiment", progress=Lines()
            )
        return out

    def critic(self, seed: int, params: Params, actor: Path) -> Path | None:
        """Return the critic of stage 3 and train it if it does not exist; None if the run has no stage 3."""
        if "critic" not in stages_of_run(params):
            return None
        sampled = (f"{seed} warmup", f"{seed} rejection")
        return self.stage("critic", f"{seed} critic", params, actor, sampled=sampled)

    def full(self, seed: int) -> None:
        params, cold = self.params(seed), self.cold(seed)
        self.evaluated(f"{seed} cold start", cold, params)
        first = self.stage("warmup", f"{seed} warmup", params, cold)
        self.evaluated(f"{seed} stage 1", first, params)
        second = self.stage("rejection", f"{seed} rejection", params, first)
        self.evaluated(f"{seed} stage 2", second, params)
        fourth = self.stage("agentic", f"{seed} agentic", params, second, self.critic(seed, params, second))
        self.evaluated(f"{seed} stage 4", fourth, params)

    def variant(self, seed: int, name: str) -> None:
        params, changed = self.params(seed), self.params(seed, VARIANTS[name])
        first = self.stage("warmup", f"{seed} warmup", params, self.cold(seed))
        second = self.stage("rejection", f"{seed} rejection", params, first)
        fourth = self.stage(
            "agentic", f"{seed} {name} agentic", changed, second, self.critic(seed, changed, second)
        )
        self.evaluated(f"{seed} {name}", fourth, changed)

    def ablations(self, seed: int) -> None:
        params, cold, name = self.params(seed), self.cold(seed), iter(ABLATIONS)
        first, second, values = (
            self.out / f"{seed} {stage}" / CHECKPOINT for stage in ("warmup", "rejection", "critic")
        )

        without = next(name)
        actor = self.stage("rejection", f"{without} rejection", params, cold)
        critic = self.stage("critic", f"{without} critic", params, actor, sampled=(f"{without} rejection",))
        self.evaluated(without, self.stage("agentic", f"{without} agentic", params, actor, critic), params)

        without = next(name)
        critic = self.stage(
            "critic", f"{without} critic", params, first, sampled=(f"{seed} warmup", f"{seed} rejection")
        )
        self.evaluated(without, self.stage("agentic", f"{without} agentic", params, first, critic), params)

        without = next(
            name
        )  # stage 1's code makes its critic from the actor, untaught; here with stage 4's settings
        fresh = params.model_copy(update={"warmup": params.agentic})
        self.evaluated(without, self.stage("warmup", f"{without} agentic", fresh, second), params)

        for setting in ("reward=speedup", "reward=log_speedup", "solve_rate_share=0.5"):
            without, changed = next(name), self.params(seed, f"agentic.{setting}")
            self.evaluated(
                without, self.stage("agentic", f"{without} agentic", changed, second, values), params
            )

        self.evaluated(next(name), first, self.params(seed, "evaluation.max_turns=1"))


def await_file(file: Path) -> None:
    """Another call of the experiment makes it, and writes it last."""
    while not file.is_file():
        time.sleep(1)


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def row(name: str, found: Evaluation) -> str:
    figures = found.overall
    reward = figures.intervals["mean_reward"]
    eager, fast = figures.geomean.eager, figures.geomean.compile
    ratios = [f"{ratio:.2f}" if ratio is not None else "-" for ratio in (eager, fast)]
    interval = f"{figures.mean_reward:.2f} [{reward.low:.2f}, {reward.high:.2f}]"
    rates = [
        share(figures.pass_rate),
        interval,
        share(figures.faster_rate.eager),
        share(figures.faster_rate.compile),
    ]
    return "| " + " | ".join([name, *rates, *ratios]) + " |"


def table(out: Path, seeds: list[int]) -> None:
    found = out / ATTAINABLE / RESULTS
    searched = Attainable.model_validate(read_json(found)) if found.is_file() else None
    columns = ["", "pass rate", "mean reward", "faster than eager", "faster than compile"]
    columns += ["geomean, eager", "geomean, compile"]
    if searched is not None:
        columns += ["captured share", "search equivalence", "gain per turn"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    evaluations = {}
    for name in [*(f"{seed} {stage}" for seed in seeds for stage in (*FULL, *VARIANTS)), *ABLATIONS]:
        if (out / f"evaluation {name}" / RESULTS).is_file():
            evaluations[name] = load_evaluation(out / f"evaluation {name}")
    rows = share_rows(evaluations, searched) if searched is not None else []
    cells = {one.name: f" {share_text(one)} | {equivalence_text(one)} | {gain_text(one)} |" for one in rows}
    for name, evaluation in evaluations.items():
        print(row(name, evaluation) + cells.get(name, ""))
    for one in rows:
        if one.choices:
            choices = ", ".join(f"{name} {value}" for name, value in one.choices.items())
            print(f"| {one.name} ({choices}) |{' |' * 6}{cells[one.name]}")
    pairs = ((FULL[0], FULL[-1]), *((FULL[-1], variant) for variant in VARIANTS))
    for seed, (before, after) in itertools.product(seeds, pairs):
        first, last = (out / f"evaluation {seed} {stage}" for stage in (before, after))
        if (first / RESULTS).is_file() and (last / RESULTS).is_file():
            change = changes(load_evaluation(first).tasks, load_evaluation(last).tasks)["mean_reward"]
            print(
                f"seed {seed}: mean reward {change.value:+.2f} [{change.low:+.2f}, {change.high:+.2f}] from"
                f" {before} to {after}, paired by task"
            )


def plot(out: Path, seeds: list[int], file: Path) -> None:
    """Draw mean reward with intervals, pass rate (dashed) and share faster than torch.compile, by stage."""
    reward, rates = [], []
    for seed, colour in zip(seeds, COLOURS, strict=False):
        found = {
            number: out / f"evaluation {seed} {stage}" for number, stage in zip(NUMBERS, FULL, strict=True)
        }
        figures = {
            number: load_evaluation(folder).overall
            for number, folder in found.items()
            if (folder / RESULTS).is_file()
        }
        bounds = [each.intervals["mean_reward"] for each in figures.values()]
        reward.append(
            Series(
                "",
                colour,
                list(figures),
                [each.mean_reward for each in figures.values()],
                [(bound.low, bound.high) for bound in bounds],
            )
        )
        rates.append(
            Series("", colour, list(figures), [each.pass_rate for each in figures.values()], dashed=True)
        )
        rates.append(
            Series("", colour, list(figures), [each.faster_rate.compile or 0.0 for each in figures.values()])
        )
    stages = "stage (0: the cold start)"
    charts = [
        line_chart(reward, x_label=stages, y_label="mean reward", y_range=(-1, 3), whole_x=True),
        line_chart(
            rates,
            x_label=stages,
            y_label="passed (dashed), faster than compile",
            y_range=(0, 1),
            whole_x=True,
        ),
    ]
    height = HEIGHT + 12
    drawn = "".join(
        '<g transform="translate(0'
        f' {place * height})">{chart[chart.index(">") + 1 : chart.index("</svg>")]}</g>'
        for place, chart in enumerate(charts)
    )
    named = "".join(
        f'<circle class="dot {colour}" cx="{60 + 80 * place}" cy="{2 * height + 6}" r="4"/><text'
        f' x="{70 + 80 * place}" y="{2 * height + 10}">seed {seed}</text>'
        for place, (seed, colour) in enumerate(zip(seeds, COLOURS, strict=False))
    )
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH}'
        f' {2 * height + 20}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    )
    file.write_text(f"{frame}{drawn}{named}</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--no-ablations", dest="ablations", action="store_false")
    parser.add_argument("--variants", default="", help=f"any of {','.join(VARIANTS)}")
    parser.add_argument("--schedules", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--part", choices=("all", "training", "evaluation"), default="all")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    out, seeds = chosen.out.resolve(), [int(seed) for seed in chosen.seeds.split(",")]
    variants = [name for name in chosen.variants.split(",") if name]
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} is unknown; give any of {','.join(VARIANTS)}")
    if not chosen.table and not chosen.plot:
        if chosen.part == "evaluation":
            await_file(out / TASKS / "tasks.parquet")
        else:
            command = [
                sys.executable,
                "-m",
                "components.cli",
                "data",
                "build",
                "--profile",
                chosen.profile,
                "--home",
                out / "home",
                "--out",
                out / TASKS,
            ]
            subprocess.run(
                [*command, *(word for value in chosen.sets for word in ("--set", value))],
                check=True,
                cwd=PROJECT,
            )
        verdicts = "verdicts of evaluations" if chosen.part == "evaluation" else "verdicts"
        pool = open_pool(resolve(chosen.profile, tuple(chosen.sets)).params, out / verdicts)
        experiment = Experiment(out, chosen.profile, tuple(chosen.sets), chosen.part, pool)
        try:
            if chosen.schedules:
                experiment.search(seeds[0], chosen.schedules)
            for seed in seeds:
                for name in variants:
                    experiment.variant(seed, name)
                if not variants:
                    experiment.full(seed)
            if chosen.ablations and not variants:
                experiment.ablations(seeds[0])
        finally:
            pool.close()
    table(out, seeds)
    if chosen.plot:
        plot(out, seeds, chosen.plot)


if __name__ == "__main__":
    main()
