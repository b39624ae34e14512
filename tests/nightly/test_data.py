"""Imported data sets and our versions: planted faults are refused, each for its own reason.

An independent audit finds nothing in what we built, and a version comes back by its digest.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from synthesis_fixtures import Borrowed, InProcess, parameters
from typer.testing import CliRunner

from components.cli.main import app
from components.core.config import resolve
from components.core.errors import IsolationUnavailable, StageFailed, UserError
from components.core.progress import Quiet
from components.core.task import KernelTask, parse_operators, read_tasks
from components.judge.judge import Judge
from components.synthesis.dataset import (
    admit_tasks,
    build_dataset,
    check_rows,
    read_public,
)
from flows import data, dataset_dvc, run_context

TASK = """import os_or_nothing
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        {body}

def get_inputs():
    return [torch.randn(256, 1024)]

def get_init_inputs():
    return []
""".replace("import os_or_nothing\n", "")


def task(body: str) -> str:
    return TASK.format(body=body)


def parquet(path: Path, rows: list[tuple[Any, str, str]]) -> Path:
    ops = [json.dumps(names) if isinstance(names, list) else names for names, _, _ in rows]
    pyarrow.parquet.write_table(
        pyarrow.table(
            {"ops": ops, "data_source": [row[1] for row in rows], "code": [row[2] for row in rows]}
        ),
        path,
    )
    return path


EVALUATION = task("return torch.softmax(F.gelu(x), dim=1)")
PLANTS: list[tuple[list[str], str, str, str]] = [
    # operators, data_source, code, the reason that it must be refused for ("" for the honest ones)
    (["torch.sigmoid", "torch.mul"], "torch#2", task("return torch.mul(torch.sigmoid(x), x)"), ""),
    (["tanh", "softplus"], "torch#2", task("return F.softplus(torch.tanh(x))"), ""),
    (
        ["torch.sigmoid", "torch.mul"],
        "torch#2",
        "# a copy\n" + task("return torch.mul(torch.sigmoid(x), x)"),
        "duplicate_source",
    ),
    (
        ["torch.sigmoid", "torch.mul"],
        "torch#2",
        task("gate = torch.sigmoid(x)\n        return torch.mul(gate, x)"),
        "duplicate_graph",
    ),
    (["torch.relu", "torch.cumsum"], "torch#2", task("return torch.relu(x) * 2.0"), "mislabelled"),
    (["torch.abs"], "torch#2", task("return torch.abs(x) * 0.5"), "mislabelled"),
    (
        ["gelu", "softmax"],
        "torch#2",
        task("return torch.softmax(F.gelu(x), dim=-1)").replace("256, 1024", "128, 512"),
        "similar_to_evaluation",
    ),
    (["silu"], "torch#1", task("import os\n        os.system('true')\n        return F.silu(x)"), "hostile"),
    (["elu"], "torch#1", task("open('/etc/passwd').read()\n        return F.elu(x)"), "hostile"),
    (["selu"], "torch#1", task("return F.selu(x)").replace("class Model", "class Other"), "contract"),
    (["celu"], "torch#1", "class Model(:", "contract"),
    (["hardtanh"], "torch#1", task(f"return F.hardtanh(x{' + x' * 3000})"), "contract"),
    (["rand_like"], "torch#1", task("return x + torch.rand_like(x)"), "not_deterministic"),
    (["zeros_like"], "torch#1", task("return torch.zeros_like(x)"), "zeros_pass"),
    (["mish"], "torch#1", task("return F.mish(torch.ones_like(x))"), "mean_passes"),
    (["matmul"], "torch#1", task("return torch.matmul(x, x)"), "does_not_run"),
    (["sigmoid"], "torch#1", task("return torch.sigmoid(x * 1.5e-3)"), "hardly_varies"),
]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "1.py").write_text(EVALUATION)
    return parquet(tmp_path / "public.parquet", [plant[:3] for plant in PLANTS])


def test_every_plant_is_refused_for_its_own_reason(judge: Judge, planted: Path, tmp_path: Path) -> None:
    params = resolve("ci", (f"data.against=[{tmp_path / 'suite'}]", "data.eager_seconds=[1e-7, 10]")).params
    pool = Borrowed(judge, params, tmp_path / "verdicts")
    try:
        tasks = read_public(planted, params.data.seed)
        summary = admit_tasks(params, tasks, len(tasks), tmp_path / "out", pool, Quiet())
    finally:
        pool.close()
    found = {int(item.task.name.removeprefix("row ")): item.reason for item in summary.rejected}
    assert found == {row: reason for row, (*_, reason) in enumerate(PLANTS) if reason}
    assert len(summary.admitted) == 2 and summary.candidates == len(PLANTS)
    assert all(0 < item.evidence["nearest"]["similarity"] <= 0.9 for item in summary.admitted)
    histogram = (tmp_path / "out" / "plots" / "similarity.csv").read_text().splitlines()[1:]
    assert sum(int(line.split(",")[1]) for line in histogram) == 8, "the whole distribution, refused ones too"


def test_check_says_per_row_why_not_and_runs_nothing(planted: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["data", "check", str(planted), "--set", f"data.against=[{tmp_path / 'suite'}]", "--json"]
    )
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    static = {
        "duplicate_source",
        "duplicate_graph",
        "mislabelled",
        "similar_to_evaluation",
        "hostile",
        "contract",
    }
    assert {row["row"]: row["reason"] for row in record["rows"]} == {
        row: reason for row, (*_, reason) in enumerate(PLANTS) if reason in static
    }
    assert record["candidates"] == len(PLANTS) and sum(record["rejected"].values()) == len(record["rows"])


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess",
        "from socket import socket",
        "__import__('os')",
        "eval('1')",
        "torch.load('x')",
        "from torch import load",
        "from torch import *",
        "import torch._C",
        "import torch as t\nt.load('x')",
        "from torch import cuda as c\nc.synchronize()",
        "__builtins__['eval']('1')",
        "().__class__",
        "import torch.utils.cpp_extension as c\nc = torch.utils.cpp_extension",
    ],
)
def test_hostile_sources_are_named(code: str) -> None:
    rows = [KernelTask(code=task("return x") + code + "\n")]
    assert [finding.reason for finding in check_rows(rows, parameters().data).values()] == ["hostile"]


def test_a_module_that_tasks_do_not_have_is_named() -> None:
    rows = [KernelTask(code=f"from transformers.activations import NewGELU\n{task('return x')}")]
    (finding,) = check_rows(rows, parameters().data).values()
    assert finding.reason == "foreign_import"
    assert "imports transformers.activations; a task may import " in finding.detail


def test_labels_are_read_as_lists_and_as_texts_of_lists() -> None:
    for value in (["a", "b"], '["a", "b"]', "['a', 'b']", "a, b"):
        assert parse_operators(value) == ("a", "b")
    assert parse_operators(None) == ()


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"code": ["x"], "ops": ["y"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="data_source"):
        read_public(tmp_path / "x.parquet", 0)


def test_an_import_that_admits_nothing_writes_nothing(tmp_path: Path) -> None:
    rows = [KernelTask(code=task("return torch.tanh(x)"))]
    with pytest.raises(UserError, match="no task was admitted"):
        admit_tasks(parameters(), rows, 1, tmp_path / "out", InProcess(refuse="tanh"), Quiet())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "tasks"
    build_dataset(parameters("data.tasks=24", "data.held_out=6"), folder, InProcess(), Quiet())
    return folder


def test_an_independent_audit_finds_nothing(built: Path) -> None:
    script = Path(audit.__file__)
    assert "components" not in script.read_text(), "the audit shares no code with what it audits"
    found = json.loads(
        subprocess.run(
            [sys.executable, script, built / "tasks.parquet"], check=True, capture_output=True, text=True
        ).stdout
    )
    assert found == {
        "rows": 30,
        **dict.fromkeys(
            ("duplicates", "mislabelled", "similar", "constant", "independent", "held_out_trained_on"), 0
        ),
        "mix_error": 0.0,
    }


def test_the_audit_would_notice(built: Path, tmp_path: Path) -> None:
    rows = pyarrow.parquet.read_table(built / "tasks.parquet").to_pylist()
    spoilt = [
        ("code", rows[0]["code"]),
        ("ops", ["torch.cumsum"] * len(rows[2]["ops"])),
        ("code", task("return torch.zeros_like(x)")),
    ]
    for row, (column, value) in zip(rows[1:], spoilt, strict=False):
        row[column] = value
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "spoilt.parquet")
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "1.py").write_text(rows[5]["code"])
    found = audit.audit(tmp_path / "spoilt.parquet", [tmp_path / "suite"], {"torch#5": 0.9})
    assert (
        found["duplicates"] == 1
        and found["constant"] == 1
        and found["similar"] >= 1
        and found["mix_error"] > 0.5
    )
    assert found["mislabelled"] >= 1


def test_stats_and_show(built: Path) -> None:
    stats = json.loads(CliRunner().invoke(app, ["data", "stats", str(built), "--json"]).stdout)
    assert (
        stats["tasks"] == 30
        and stats["splits"] == {"train": 24, "held_out": 6}
        and stats["eager_seconds"]["median"] > 0
    )
    tasks = read_tasks(built / "tasks.parquet")
    shown = json.loads(
        CliRunner()
        .invoke(app, ["data", "show", tasks[3].task_id[:10], "--dataset", str(built), "--json"])
        .stdout
    )
    assert shown["code"] == tasks[3].code and shown["evidence"]["eager_seconds"] > 0


def test_the_card_says_where_the_rows_are(built: Path) -> None:
    front = yaml.safe_load((built / "README.md").read_text().split("---")[1])
    assert [file["path"] for config in front["configs"] for file in config["data_files"]] == ["tasks.parquet"]


def test_a_version_comes_back_by_its_digest(built: Path, tmp_path: Path) -> None:
    home = ["--home", str(tmp_path / "home"), "--json"]
    pushed = CliRunner().invoke(app, ["data", "push", str(built), *home])
    version = json.loads(pushed.stdout)["version"]
    pulled = json.loads(CliRunner().invoke(app, ["data", "pull", version[:10], *home]).stdout)
    folder = Path(pulled["path"])
    assert folder.name == version and (folder / "README.md").is_file()
    assert (folder / "tasks.parquet").read_bytes() == (built / "tasks.parquet").read_bytes()
    (folder / "tasks.parquet").write_bytes(b"spoilt")
    assert CliRunner().invoke(app, ["data", "pull", version, *home]).exit_code == 0
    assert (folder / "tasks.parquet").read_bytes() == (built / "tasks.parquet").read_bytes()
    unknown = CliRunner().invoke(app, ["data", "pull", "0" * 64, *home])
    assert isinstance(unknown.exception, UserError) and "holds no version" in str(unknown.exception)


def test_a_runs_version_comes_back_by_its_digest(tmp_path: Path) -> None:
    """What the flow does after DVC has made the data set, without the judge."""
    night = run_context.open_run(resolve("ci", (f"home={tmp_path}",)))
    workspace = data.prepare_workspace(night)
    build_dataset(parameters(), workspace / dataset_dvc.OUTPUT, InProcess(), Quiet())
    data.dvc(workspace, ["commit", "--force"], Quiet())
    data.dvc(workspace, ["push"], Quiet())
    kept = data.keep_version(night.home, workspace)
    version = kept.name
    dataset_dvc.keep_lock(night.params, night.home, version, workspace / "dvc.lock")
    before = (kept / "tasks.parquet").read_bytes()
    shutil.rmtree(night.home / "datasets")
    shutil.rmtree(workspace)
    folder = dataset_dvc.pull(night.params, night.home, version[:8])
    assert folder.name == version and (folder / "tasks.parquet").read_bytes() == before


def test_what_lies_where_a_data_set_shall_be_written_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(UserError, match=f"{name}: holds something else than a data set"):
            build_dataset(parameters(), tmp_path / name, InProcess(), Quiet())
    first = build_dataset(parameters(), tmp_path / "set", InProcess(), Quiet())
    assert build_dataset(parameters(), tmp_path / "set", InProcess(), Quiet()).version == first.version
    with pytest.raises(UserError, match=f"set: holds data set {first.version[:12]}"):
        build_dataset(parameters("data.seed=7"), tmp_path / "set", InProcess(), Quiet())
    (tmp_path / "set" / "tasks.parquet.dvc").write_text("mine")
    with pytest.raises(UserError, match=r"set: holds something else than a data set \(tasks\.parquet\.dvc\)"):
        build_dataset(parameters(), tmp_path / "set", InProcess(), Quiet())
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "notes.txt").read_text() == "mine"


FAILING = """
import sys
from components.core.errors import UserError
from components.core.errors import IsolationUnavailable
from components.cli.main import main
from components.synthesis import dataset

def build_dataset(*given):
    raise {error}

dataset.build_dataset = build_dataset
sys.argv = "cuda-agent data build --profile= --params params.yaml --out data/tasks".split()
main()
"""


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            "RuntimeError('deep inside')",
            StageFailed,
            r"dataset: dvc repro failed: RuntimeError: deep inside; .*failed\.log",
        ),
        ("UserError('params.yaml: a field; fix it.')", UserError, r"^params\.yaml: a field; fix it\.$"),
        ("IsolationUnavailable('no sandbox; fix it.')", IsolationUnavailable, r"^no sandbox; fix it\.$"),
    ],
    ids=["failure", "bad input", "no isolation"],
)
def test_what_fails_below_dvc_is_one_sentence_and_its_traceback_is_in_the_log(
    error: str, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    night = run_context.open_run(resolve("ci", (f"home={tmp_path}",)))
    workspace = data.prepare_workspace(night)
    (workspace / "failing.py").write_text(FAILING.format(error=error))
    (workspace / "dvc.yaml").write_text("stages: {tasks: {cmd: python failing.py}}\n")
    with pytest.raises(kind, match=said) as caught:
        data.dvc(workspace, ["repro"], Quiet())
    assert "\n" not in str(caught.value)
    if kind is StageFailed:
        log = (workspace / ".dvc" / "failed.log").read_text()
        assert "Traceback" in log and str(workspace / ".dvc" / "failed.log") in str(caught.value)
