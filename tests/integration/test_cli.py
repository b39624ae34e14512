"""Claims about the command: what it prints where, and how it ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from cli_fixtures import command, one_sentence

from components.agent import utilities
from components.agent.utilities import Utility
from components.cli.common import CommonOptions, print_line, print_table, stderr_console
from components.cli.doctor import Finding, examine
from components.cli.progress_view import ProgressView
from components.core import config
from components.core.config import resolve
from components.core.errors import InfrastructureError, IsolationUnavailable, UserError
from flows.processes import prefect_server
from flows.run_context import home_lock


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    probe = (
        "import sys; import components.cli.main; print([m for m in ('torch', 'prefect', 'mlflow',"
        " 'transformers', 'rich') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_run_imports_torch_only_when_a_stage_is_not_cached() -> None:
    probe = (
        "import sys; import flows.nightly, components.training.stage; print([m for m in ('torch',"
        " 'transformers', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PREFECT_LOGGING_LEVEL": "CRITICAL"},
    )
    assert done.stdout.strip() == "[]"


def test_square_brackets_and_colons_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]a[/wiki] :bug: [/usr/lib/x.so] run[b]/c"
    print_line(text)
    print_table((text,), [(text,)])
    ProgressView(stderr_console()).note(text)
    assert capsys.readouterr().err.count(text) == 4


def test_a_faulty_row_of_a_data_set_does_not_hide_the_others(tmp_path: Path) -> None:
    codes = ["def", "class Model: ...", "\0", "class Model: ...  # the same task once more"]
    table = pyarrow.table({"code": codes, "data_source": ["x"] * 4, "ops": [5] * 4})
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    done = command("data", "show", "", "--dataset", str(tmp_path), "--json")
    assert json.loads(done.stdout)["code"] == "class Model: ..."
    done = command("data", "check", str(tmp_path), "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["rejected"] == {"contract": 4}


def test_a_run_whose_server_ended_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def night() -> None:
        with prefect_server(tmp_path) as server:
            assert server is not None
            server.process.terminate()  # while it starts
            try:
                httpx.get(server.url)
            except httpx.TransportError as error:
                raise RuntimeError("Prefect's client wraps it") from error

    with pytest.raises(UserError, match=r"server\.log: Prefect's server ended under the run"):
        night()


def test_a_prefect_server_that_does_not_answer_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with (
        pytest.raises(UserError, match=r"^PREFECT_API_URL: no server answers at http://127\.0\.0\.1:9/api"),
        prefect_server(tmp_path),
    ):
        pass


@pytest.mark.parametrize("name", ["😀", "é", "a b: #c"])
def test_a_home_may_have_any_name(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    assert CommonOptions(home=str(home)).resolve().params.home == str(home)


def test_the_lines_of_a_failed_ranks_log_stay_lines() -> None:
    program = """
import components.cli.main as main
from components.core.errors import StageFailed
def app():
    raise StageFailed("rank 1 of 2 died.\\nIts log ends with:\\n  File a.py\\n  out of luck")
main.app = app
main.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ("cuda-agent: rank 1 of 2 died.\nIts log ends with:\n  File a.py\n  out of luck\n")


HOLDER = """
import sys, time
from pathlib import Path
from flows.processes import prefect_server
from flows.run_context import home_lock
with home_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_the_same_home_names_the_first_until_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            assert f"process {process.pid}" in one_sentence(command("run", "--home", str(tmp_path)))
        finally:
            process.kill()
    with home_lock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_params_tell_value_meaning_and_source() -> None:
    done = command("params", "--profile", "smoke", "--set", "seed=7", "--json")
    rows = json.loads(done.stdout)["params"]
    assert rows["seed"] == {
        "value": 7,
        "meaning": "seed of sampling and of the training stages",
        "source": "--set seed=7",
        "kind": "result",
    }
    assert rows["device"]["source"] == "params.yaml: profiles.smoke"
    assert rows["gate.regression"]["meaning"] and rows["data.operator_mix"]["value"]
    shown = command("params", "--profile", "smoke", "--set", "data.against=[/srv/a b]")
    assert shown.returncode == 0 and '["/srv/a b"]' in shown.stderr


def test_a_section_is_set_field_by_field() -> None:
    rollouts = resolve("smoke", ("warmup.rollouts={tasks: 4, samples: 2}",)).params.warmup.rollouts
    assert (rollouts.tasks, rollouts.samples, rollouts.max_turns) == (4, 2, 1)
    assert resolve("smoke", ("data.operator_mix={1: 1.0}",)).params.data.operator_mix == {1: 1.0}, (
        "a mapping is one value"
    )
    with pytest.raises(
        UserError,
        match=r"unknown parameter warmup.rollouts.task; the nearest known one is warmup.rollouts.tasks",
    ):
        resolve("smoke", ("warmup.rollouts={task: 4}",))


def test_json_is_one_object_and_the_rest_goes_to_standard_error() -> None:
    done = command("doctor", "--json")
    record = json.loads(done.stdout)
    assert {finding["name"] for finding in record["findings"]} >= {
        "python",
        "torch",
        "g++",
        "bwrap",
        "gpu",
        "disk",
        "prefect",
    }
    assert done.returncode == (2 if record["missing"] else 0)
    assert "torch" in done.stderr


def test_the_doctor_says_what_an_absence_costs(tmp_path: Path) -> None:
    done = command("doctor", "--json", path=str(tmp_path))
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 2
    assert not found["bwrap"]["here"] and "refuses" in found["bwrap"]["cost"]
    assert not found["g++"]["here"] and "kernel" in found["g++"]["cost"]


def test_the_doctor_says_how_to_get_kernelbench_and_that_it_is_there(tmp_path: Path) -> None:
    checkout = tmp_path / "KernelBench"

    def found() -> dict[str, Finding]:
        sets = (
            "device=cpu",
            f"home={tmp_path}",
            f"evaluation.suite={checkout}",
            f"data.against=[{checkout}]",
        )
        return {finding.name: finding for finding in examine(resolve("h20-pool", sets))}

    for finding in (found()["suite"], found()["evaluation programs"]):
        assert finding.needed and not finding.here
        assert f"git clone https://github.com/ScalingIntelligence/KernelBench {checkout}" in finding.cost
    (checkout / "KernelBench" / "level1").mkdir(parents=True)
    for name in ("1_A.py", "2_B.py"):
        (checkout / "KernelBench" / "level1" / name).write_text(
            "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"
        )
    assert found()["suite"].found == f"{checkout}: 2 tasks"
    assert found()["evaluation programs"].found == "training tasks stay clear of 2 programs"


def test_no_model_yet_is_one_sentence(tmp_path: Path) -> None:
    assert "no run was registered here" in one_sentence(command("models", "list", "--home", str(tmp_path)))


def test_comparing_with_a_run_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert "no such finished run or evaluation" in one_sentence(
        command("runs", "compare", "a", "b", "--home", str(tmp_path))
    )


RUN = """
import subprocess, sys, time
from components.core.reaper import start_reaper
start_reaper()
titled = '''
import ctypes, os, time
begin, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
if "SPT_NOENV" not in os.environ:  # as setproctitle does
    ctypes.memset(begin, 0, end - begin)
print(os.getpid(), flush=True)
time.sleep(300)
'''
child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {titled!r}])"
print(subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
time.sleep(300)
"""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_everything_dies_with_the_run() -> None:
    """A killed run cannot clean up: the reaper kills its children and theirs, also those that set a title."""
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(alive, started))
        process.kill()
        deadline = time.monotonic() + 60
        while any(map(alive, started)) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(map(alive, started))


@pytest.mark.parametrize("machine", ["cpu", "cuda"])
def test_set_device_is_obeyed_whatever_the_machine_has(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "default_device", lambda: machine)

    def device(*sets: str, option: str = "") -> str:
        return CommonOptions("", sets=list(sets)).resolve(device=option).params.device

    assert device() == machine
    assert device("device=cpu") == "cpu" and device("device=cuda") == "cuda"
    assert device("device=cuda", option="cpu") == "cpu", "the option --device is the command's own"
    assert CommonOptions("").resolve().params.device == "cuda", "as in params.yaml"


@pytest.mark.parametrize("utility", ["compile", "verification"])
@pytest.mark.parametrize(
    ("error", "code"), [(IsolationUnavailable("bwrap is missing."), 3), (InfrastructureError("no fork"), 2)]
)
def test_a_utility_that_cannot_judge_does_not_say_that_the_candidate_failed(
    utility: Utility,
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utilities, "check_isolation", fail)
    with pytest.raises(SystemExit) as ended:
        utilities.run_utility(utility)
    assert ended.value.code == code and capsys.readouterr().err == f"{error}\n"
