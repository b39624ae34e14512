"""A registry with versions in a real MLflow store, and evaluations to gate: what the tests of promotion share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from components.core.config import Gate as Thresholds
from components.core.config import Registry
from components.core.files import digest_file, digest_json, digest_tree, write_json
from components.evaluation.exploits import Sample
from components.evaluation.metrics import TaskResult, by_level, summarise
from components.evaluation.results import Evaluation
from components.judge.verdict import Ratio, Speedup
from components.registry import models
from components.registry.gates import Decision
from components.registry.promotion import Promotion
from components.registry.tracking import MlflowRun, connect

PARAMS = Registry(tracking_uri="", experiment="nights", model="policy", audit="")
THRESHOLDS = Thresholds(
    pass_rate=0.5,
    faster_rate_eager=0.5,
    faster_rate_compile=0.5,
    faster_rate_compile_by_level={1: 0.3},
    geomean_eager=1.0,
    geomean_compile=1.0,
    regression=0.05,
    measured=1.0,
    exploits=1.0,
    approval="automatic",
    approval_seconds=3600,
)
PASSING = Decision(verdict="promoted", gates=(), reasons=("all gates passed.",))
WAITING = Decision(verdict="waiting", gates=(), reasons=("a person has to approve.",))
SOUND = Sample(tried=12, refused=12, wrong=(), device="x")


def task(index: int, eager: float = 2.0, compiled: float = 2.0, status: str = "correct") -> TaskResult:
    speedup = Speedup(
        eager=Ratio(estimate=eager, low=eager, high=eager),
        compile=Ratio(estimate=compiled, low=compiled, high=compiled),
    )
    return TaskResult.model_validate(
        {
            "task_id": f"t{index}",
            "level": 1 + index % 2,
            "status": status,
            "speedup": speedup,
            "evidence": {"device": "x", "isolation": "bubblewrap"},
        }
    )


def evaluation(rows: list[TaskResult]) -> Evaluation:
    overall = summarise(rows)
    return Evaluation(
        suite="held-out",
        suite_digest="0" * 64,
        policy="p",
        policy_digest="1" * 64,
        device="cpu",
        precision="strict-fp32",
        epoch="e",
        seed=0,
        tasks=tuple(rows),
        overall=overall,
        levels=by_level(rows),
        errors=overall.errors,
    )


def make(home: Path, versions: int = 3) -> None:
    """Registered versions 1 to `versions`, each with a checkpoint of its own and its evidence."""
    client = connect(PARAMS, home)
    for number in range(1, versions + 1):
        folder = home / "checkpoints" / str(number)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights of %d" % number)
        (folder / "config.json").write_text("{}")
        files = digest_tree(folder)
        write_json(folder / "manifest.json", {"files": files, "digest": digest_json(files)})
        report = home / f"report-{number}.html"
        report.write_text("<html></html>")
        run = MlflowRun(client, PARAMS, home, f"night-{number}", "n")
        version = models.register(
            client,
            model=PARAMS.model,
            run_key=f"night-{number}",
            run_id=run.run_id,
            experiment_id=run.experiment_id,
            checkpoint=folder,
            tags={
                "checkpoint.digest": digest_json(files),
                "manifest.digest": digest_file(folder / "manifest.json"),
                "report": str(report),
                "dataset.version": "d1",
            },
            figures={},
        )
        assert version == str(number)


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store: making its tables takes seconds, copying them does not."""
    folder = tmp_path_factory.mktemp("blank")
    connect(PARAMS, folder).search_experiments()
    return folder / "mlflow" / "mlflow.db"


@pytest.fixture
def home(tmp_path: Path, blank: Path) -> Path:
    (tmp_path / "mlflow").mkdir()
    shutil.copy(blank, tmp_path / "mlflow" / "mlflow.db")
    make(tmp_path)
    return tmp_path


def office_of(home: Path) -> Promotion:
    return Promotion(connect(PARAMS, home), PARAMS, home)


def settle(
    office: Promotion, version: str, decision: Decision = PASSING, champion: str | None = None, **rest: Any
) -> Any:
    return office.settle(
        version, decision, champion=champion, approval_seconds=rest.pop("approval_seconds", 3600), **rest
    )


def aliases(office: Promotion) -> dict[str, str]:
    return models.aliases(office.client, PARAMS.model)
