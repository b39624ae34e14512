"""Claims about the command: what it prints where, how it ends, and that a mistake is one sentence."""

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

from components.agent import utilities
from components.agent.utilities import Utility
from components.cli.common import CommonOptions, print_line, print_table, stderr_console
from components.cli.doctor import Finding, examine
from components.cli.progress_view import ProgressView
from components.core import config
from components.core.config import resolve
from components.core.errors import InfrastructureError, IsolationUnavailable, UserError
from components.judge.pool.open_pool import judge_workdir
from flows.processes import prefect_server
from flows.run_context import home_lock

CLI = [sys.executable, "-m", "components.cli"]


def command(
    *arguments: str, path: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | ({"PATH": path} if path is not None else {})
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300, check=False
    )


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on standard error of a command that ended with 2 and printed nothing else."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("cuda-agent: "), done.stderr
    return lines[0]


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


def test_an_unknown_parameter_names_the_nearest_known_one(tmp_path: Path) -> None:
    assert "the nearest known one is warmup.steps" in one_sentence(
        command("run", "--home", str(tmp_path), "--set", "warmup.step=3")
    )


def test_a_stage_that_would_never_train_the_policy_is_refused(tmp_path: Path) -> None:
    options = ("--set", "warmup.steps=2", "--set", "warmup.critic_warmup_steps=2")
    assert "warmup.critic_warmup_steps leaves fewer than warmup.min_updates of the 2 steps" in one_sentence(
        command("run", "--home", str(tmp_path), *options)
    )


def test_a_value_out_of_range_says_what_the_parameter_is(tmp_path: Path) -> None:
    sentence = one_sentence(command("run", "--home", str(tmp_path), "--set", "gate.pass_rate=2"))
    assert "gate.pass_rate = 2" in sentence and "least lower end" in sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 2024-13-45", "not valid YAML (month must be in 1..12)"),
        (f"seed: {'[' * 3000}", "not valid YAML"),
        ("seed: !!bool x", "not valid YAML"),
        ("data: &a\n  seed: *a", "not valid YAML (Circular reference detected)"),
        ("- a", "a mapping of parameters is expected"),
        ("profiles: [smoke]", "profiles must be a mapping"),
        ("profiles: {smoke: 5}", "profiles must be a mapping"),
        ("profiles: {1: {}}", "unknown profile smoke; give one of 1"),
    ],
)
def test_a_parameter_file_of_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match=r"own\.yaml: ") as error:
        resolve("smoke", (), tmp_path / "own.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ("seed=2024-13-45", "not valid YAML"),
        (f"seed={'9' * 5000}", "not valid YAML"),
        (f"seed={'[' * 3000}", "not valid YAML"),
        ("data=&a {b: *a}", "not valid YAML"),
        ("seed=4294967296", "less than or equal to 4294967295"),
        ("coldstart.seed=100000000000000000000000", "less than or equal to 4294967295"),
        ("registry.model=o'brien", 'registry.model = "o\'brien" is not accepted'),
        ("registry.model=a/b", "registry.model = 'a/b' is not accepted"),
    ],
)
def test_a_value_that_nothing_can_use_is_refused(set_: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^--set {set_.partition('=')[0]}=") as error:
        resolve("smoke", (set_,))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "store gc --older-than 1e300",
        "token create a --days 1e300",
        "optimize model.py --attempts 99999999999999999999999",
        "params --write /proc/x",
    ],
)
def test_an_option_out_of_range_is_bad_input(tmp_path: Path, arguments: str) -> None:
    done = command(*arguments.split(), cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not any(tmp_path.iterdir())


def test_what_a_path_holds_instead_of_a_policy_or_a_candidate_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.sh").write_text("x")
    for name, said in {"file.sh": "is neither a folder nor a GGUF file", "x": "does not exist"}.items():
        with pytest.raises(UserError, match=f"policy.source: .*{name} {said}"):
            config.check_policy_source(resolve("smoke", (f"policy.source={tmp_path / name}",)).params)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--against .*empty: has no model_new\.py"):
        judge_workdir(
            resolve("smoke").params, tmp_path / "file.sh", None, tmp_path, against=tmp_path / "empty"
        )


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


def test_an_unknown_profile_names_those_there_are(tmp_path: Path) -> None:
    assert "unknown profile smoek; give one of h20-pool, smoke," in one_sentence(
        command("run", "--home", str(tmp_path), "--profile", "smoek")
    )
    (tmp_path / "own.yaml").write_text("profiles:\n")
    assert "unknown profile smoke; give one of none: it has no profiles" in one_sentence(
        command("run", "--home", str(tmp_path), "--params", str(tmp_path / "own.yaml"))
    )


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ("store.url=ftp://somewhere", "ftp://somewhere is neither a folder nor s3://bucket/prefix"),
        ("store.url=s3://", "names no bucket"),
        ("evaluation.suite=nowhere", "evaluation.suite: nowhere is neither"),
        ("evaluation.suite=shipped evaluation.levels=[9]", "shipped has no task of level 9"),
        (
            "evaluation.suite=nowhere/KernelBench",
            "git clone https://github.com/ScalingIntelligence/KernelBench nowhere/KernelBench",
        ),
        ("data.against=[nowhere]", "data.against: nowhere is neither"),
    ],
)
def test_what_only_the_last_steps_of_a_run_use_is_looked_at_first(
    tmp_path: Path, set_: str, said: str
) -> None:
    sets = [word for change in set_.split() for word in ("--set", change)]
    assert said in one_sentence(command("run", "--home", str(tmp_path / "home"), *sets))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("profile", ["hf", "hf-adapter", "h20-pool"])
def test_a_profile_without_its_model_says_so_before_any_work(profile: str, tmp_path: Path) -> None:
    said = (
        "policy.source: models/policy does not exist; link the folder of a Hugging Face model there, "
        "or give one, or a GGUF file, with --set policy.source=PATH."
    )
    home, output = tmp_path / "home", tmp_path / "stage"
    arguments = ("--profile", profile, "--home", str(home))
    assert one_sentence(command("run", *arguments, cwd=tmp_path)) == f"cuda-agent: {said}"
    assert not home.exists()
    if profile != "hf":
        return  # the other commands are the same for all profiles
    stage = ("warmup", "--input", "START", "--dataset", "DATA", "--output", str(output))
    for ranks in ("1", "2"):
        started = command("train", *stage, "--ranks", ranks, *arguments, cwd=tmp_path)
        assert one_sentence(started) == f"cuda-agent: {said}"
    assert not home.exists() and not output.exists()

    doctor = command("doctor", "--json", *arguments, cwd=tmp_path)
    findings = {finding["name"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert doctor.returncode == 2
    assert findings["policy"] | {"here": False, "needed": True, "cost": said} == findings["policy"]
    # What trains nothing needs no model.
    listed = command("params", "--json", *arguments, cwd=tmp_path)
    assert json.loads(listed.stdout)["params"]["policy.source"]["value"] == "models/policy"


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


def test_a_reward_that_cannot_be_imported_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    home = tmp_path / "home"
    said = one_sentence(command("run", "--home", str(home), "--set", "reward=no_such_module.reward"))
    assert "params.yaml: reward: no_such_module.reward cannot be imported" in said and not home.exists()


def test_an_unknown_stage_lists_the_stages(tmp_path: Path) -> None:
    assert "coldstart" in one_sentence(command("run", "--home", str(tmp_path), "--from", "stage1"))


def test_a_redo_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "nothing was run" in one_sentence(
        command("run", "--home", str(tmp_path / "new"), "--from", "critic")
    )


def test_a_redo_of_a_stage_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    sets = ("--set", "agentic.advantages=group")
    assert "this run trains no critic; give agentic" in one_sentence(
        command("run", "--home", str(tmp_path / "new"), "--from", "critic", *sets)
    )


def test_an_unwritable_home_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in one_sentence(command("run", "--home", str(tmp_path / "file" / "home")))


def test_a_missing_compiler_and_missing_bubblewrap_are_named(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    assert "g++ is not installed" in one_sentence(
        command("run", "--home", str(tmp_path / "home"), path=str(programs))
    )
    (programs / "g++").write_text("#!/bin/sh\n")
    (programs / "g++").chmod(0o755)
    done = command("run", "--home", str(tmp_path / "home"), path=str(programs))
    assert (
        done.returncode == 3
        and "bubblewrap is not installed" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    (programs / "bwrap").write_text("#!/bin/sh\necho no namespaces here >&2; exit 1\n")
    (programs / "bwrap").chmod(0o755)
    done = command("run", "--home", str(tmp_path / "home"), path=str(programs))
    assert (
        done.returncode == 3
        and "no sandbox can be made here" in done.stderr
        and "(the system says: no namespaces here)" in done.stderr
    )


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
child = "import subprocess, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
print(subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
time.sleep(300)
"""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_everything_dies_with_the_run() -> None:
    """A killed run cannot clean up: the reaper kills its children and theirs."""
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
