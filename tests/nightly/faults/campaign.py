"""Many faults in many nights on the whole stack of one host, and what became of each.

    infra/one-host.sh up STACK --profile ci
    . STACK/environment
    PYTHONPATH=.:tests/fixtures python tests/nightly/faults/campaign.py STACK RECORD.jsonl --seconds 400

Every night is the reduced one of the tests under its own seed and registered model. While it runs, faults
come at random moments, each kind twice; a night that they end is started again by the same command, as a
person would. A finished night is held against what must be true (`wrong`), every fourth also against an
undisturbed night from the same verdicts in another home. RECORD has one line a fault, an end and a night; a
repeated call goes on where the last one was stopped, and `--table` prints what a record amounts to.

The command runs in forks of this process: the imports, most of a short night's time, are made once.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from fault_kinds import FAULTS, again, hand
from pipeline_process import PipelineRun

ATTEMPTS = 40
LONGEST_PAUSE = 4.0
COMPARED = 4
"""Every so many nights one is run undisturbed too."""
SERVICES = ("postgres", "s3", "prefect", "mlflow")
"""In the order in which they stand on one another."""


def wrong(night: PipelineRun) -> list[str]:
    """What is not as it must be after a finished night, a sentence each."""
    from components.core.config import resolve
    from components.core.errors import UserError
    from components.registry.promotion import Promotion
    from components.registry.tracking import RUN_KEY, connect
    from components.storage import S3Store, open_store
    from flows.processes import VARIABLE
    from flows.run_context import PipelineRun as Identity

    resolved = resolve("ci", (*night.sets, f"home={json.dumps(str(night.home))}"))
    identity, params = Identity(resolved), resolved.params
    client, found = connect(params.registry, night.home), []
    run_context = client.search_runs(
        [item.experiment_id for item in client.search_experiments()],
        filter_string=f"tags.`{RUN_KEY}` = '{identity.key}'",
    )
    names = Counter(run.data.tags.get("cuda_agent.stage", "night") for run in run_context)
    found += [f"MLflow has {count} runs of {name}" for name, count in names.items() if count > 1]
    found += [
        f"MLflow's run of {run.info.run_name} is {run.info.status}"
        for run in run_context
        if run.info.status != "FINISHED"
    ]
    versions = client.search_model_versions(f"name = '{params.registry.model}'")
    found += [f"{len(versions)} versions registered"] if len(versions) != 1 else []
    promotion = Promotion(client, params.registry, night.home)
    promoted = [entry for entry in promotion.chain.entries() if entry.action == "promoted"]
    found += [f"promoted {len(promoted)} times"] if len(promoted) != 1 else []
    found += promotion.verify()
    store = open_store(params.store, night.home)
    assert isinstance(store, S3Store)
    found += [f"unfinished upload of {key}" for key, _ in store.abandoned(timedelta(0))]
    for entry in store.entries():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                store.get(entry.key, Path(scratch) / "object")
            except UserError as error:
                found.append(str(error))
    mine = f"{os.getpid()}-"
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(VARIABLE, "")
            if str(night.home) in " ".join(process.cmdline()) or mark.startswith(mine):
                found.append(f"process {process.pid} ({process.name()}) is left")
        except psutil.Error:
            continue
    return found


def manifest(night: PipelineRun) -> dict[str, str]:
    (file,) = night.home.glob("runs/*/manifest.json")
    values: dict[str, str] = json.loads(file.read_text())
    return values


def to_the_end(night: PipelineRun, tell: Callable[..., None], left: list[str], chance: random.Random) -> int:
    """Run the night until it is done, with the faults that are left of its hand; how often it was started."""
    for attempt in range(1, ATTEMPTS + 1):
        night.start()
        while (code := night.ended(chance.uniform(0.5, LONGEST_PAUSE) if left else 600)) is None:
            if not left:
                raise SystemExit(f"night {night.seed}: no end after 600 s without a fault")
            # The first of the hand that finds something to kill now; what finds nothing (no compiler runs)
            # waits its turn.
            for name in left:
                if FAULTS[name](night, chance):
                    left.remove(name)
                    tell(seed=night.seed, fault=name)
                    break
        for service in SERVICES:
            again(night.stack, service)
        if code == 0:
            return attempt
        tell(seed=night.seed, code=code)
    raise SystemExit(f"night {night.seed}: not done after {ATTEMPTS} attempts")


def table(lines: list[dict[str, Any]]) -> str:
    """Count faults of finished runs by kind: continued by themselves, or by the same command."""
    nights = [line for line in lines if "wrong" in line]
    done = {line["seed"] for line in nights}
    went_on, ended = Counter[str](), Counter[str]()
    for line, following in zip(lines, [*lines[1:], {}], strict=True):
        if "fault" in line and line["seed"] in done:
            (ended if "code" in following else went_on)[line["fault"]] += 1
    rows = [
        f"| {name} | {went_on[name] + ended[name]} | {went_on[name]} | {ended[name]} |" for name in FAULTS
    ]
    bad = [f"night {line['seed']}: {'; '.join(line['wrong'])}" for line in nights if line["wrong"]]
    all_of_them = f"all, in {len(nights)} nights, {sum(line['compared'] for line in nights)} of them compared"
    total = f"| {all_of_them} | {went_on.total() + ended.total()} | {went_on.total()} | {ended.total()} |"
    return "\n".join(
        [
            "| fault | injected | the night went on | ended, continued by the same command |",
            "| --- | --- | --- | --- |",
            *rows,
            total,
            *bad,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stack", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--seconds", type=float, default=400, help="no new night after so many")
    parser.add_argument("--pool", choices=("local", "ray"), default="local", help="where the judges are")
    parser.add_argument(
        "--homes", type=Path, help="folder of the homes; on a file system of its own the disk is filled too"
    )
    parser.add_argument("--table", action="store_true", help="only print what the record amounts to")
    given = parser.parse_args()
    lines = (
        [json.loads(line) for line in given.record.read_text().splitlines()] if given.record.is_file() else []
    )
    if given.table:
        print(table(lines))
        return
    homes = given.homes or given.stack / "homes"
    started = time.monotonic()

    def tell(**line: Any) -> None:
        lines.append(line)
        with given.record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    from flows import run_context

    run_context.prepare_environment(given.stack)
    import deepspeed  # noqa: F401  before the forks

    import flows.nightly  # noqa: F401

    while time.monotonic() - started < given.seconds:
        last = lines[-1] if lines else {"seed": 0, "wrong": []}
        seed = last["seed"] + ("wrong" in last)
        night, calm = (
            PipelineRun(given.stack, homes / kind, seed, f"{kind}-{seed}", given.pool)
            for kind in ("night", "calm")
        )
        if "wrong" in last:
            for home in (night.home, calm.home):
                shutil.rmtree(home, ignore_errors=True)
        chance, began = random.Random(seed), time.monotonic()
        left = hand(night, chance)
        for line in lines:
            if line["seed"] == seed and line.get("fault") in left:
                left.remove(line["fault"])
        attempts = to_the_end(night, tell, left, chance)
        problems = wrong(night)
        compared = seed % COMPARED == 1
        if compared:
            shutil.copytree(night.home / "verdicts", calm.home / "verdicts", dirs_exist_ok=True)
            to_the_end(calm, tell, [], chance)
            ours, theirs = manifest(night), manifest(calm)
            problems += [
                f"{name} differs from the undisturbed night's"
                for name in sorted(ours.keys() | theirs.keys())
                if ours.get(name) != theirs.get(name)
            ]
        tell(
            seed=seed,
            attempts=attempts,
            seconds=round(time.monotonic() - began),
            compared=compared,
            wrong=problems,
        )
        print(f"night {seed}: {attempts} attempts, {problems or 'nothing wrong'}", flush=True)


if __name__ == "__main__":
    main()
