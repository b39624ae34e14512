"""Whole commands succeed in the surroundings of ordinary users. Nothing here needs root."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from run_fixtures import REDUCED, words
from surroundings import Surroundings, run

from components.core.config import PROJECT

CLI = [sys.executable, "-m", "components.cli"]


KEPT = {str(PROJECT): str(PROJECT)}
"""The checkout as a mount of its own, so that it may lie in /tmp, whose mount a test changes."""


SOURCES = ("components", "flows", "agent_workdir", "params.yaml", "dvc.yaml", "pyproject.toml")


def judged(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, (done.returncode, done.stderr)
    verdict = json.loads(done.stdout)
    assert verdict["status"] == "correct", verdict
    assert verdict["speedup"]["compile"] is not None, "torch.compile was measured as well"
    return done.stderr


def test_an_archive_at_a_path_with_a_blank_and_an_umlaut_that_nobody_may_write_or_others_read(
    outside_tmp: Path,
) -> None:
    outside_tmp.chmod(0o700)
    checkout = outside_tmp / "Über uns" / "a b"
    checkout.mkdir(parents=True)
    for name in SOURCES:
        (shutil.copytree if (PROJECT / name).is_dir() else shutil.copy)(PROJECT / name, checkout / name)
    environment = checkout / ".venv"  # so that the packages, too, have a blank in their path
    environment.mkdir()
    for path in (checkout, *checkout.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    around = Surroundings(bound={str(environment): sys.prefix}, read_only=(str(checkout),), umask=0o077)
    command = [
        str(environment / "bin" / "python"),
        "-B",
        "-m",
        "components.cli",
        "judge",
        "agent_workdir",
        "--json",
        "--home",
        str(outside_tmp / "der Ort"),
    ]
    judged(run(command, around, checkout))


def test_a_run_on_a_small_system_behind_a_proxy(outside_tmp: Path) -> None:
    """Judge and run the pipeline from a read-only checkout, with /tmp noexec and no HOME.

    Also 64 MB of shared memory, 1,024 descriptors, the locale C and a proxy that does not answer. The judge
    is called by itself because the reduced pipeline's policy hardly writes a correct kernel.
    """
    around = Surroundings(
        bound=KEPT,
        read_only=(str(PROJECT),),
        noexec=("/tmp",),
        sizes={"/dev/shm": 64 << 20},
        limits={"RLIMIT_NOFILE": 1024},
        variables={"HOME": None, "LC_ALL": "C", "LANG": None}
        | dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
        ),
    )
    home = outside_tmp / "home"
    judged(run([*CLI, "judge", "agent_workdir", "--json", "--home", str(home)], around, PROJECT))
    done = run([*CLI, *words(home, REDUCED)], around, PROJECT, seconds=1500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gate"]["verdict"] == "promoted"


def test_a_container_that_hides_parts_of_proc(outside_tmp: Path) -> None:
    around = Surroundings(sizes={"/proc/fs": 1 << 12})
    judged(run([*CLI, "judge", "agent_workdir", "--json", "--home", str(outside_tmp)], around, PROJECT))


def test_a_machine_that_sleeps_in_a_measurement_times_nobody_out(tmp_path: Path) -> None:
    """Every process below a judge is stopped for longer than a candidate's limit, and goes on."""
    limits = ["--set", "sandbox.run_seconds=10", "--profile", "ci"]
    command = [*CLI, "judge", "agent_workdir", "--json", "--home", str(tmp_path), *limits]
    with subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as judge:
        deadline = time.monotonic() + 300
        while not any("zygote.py" in " ".join(words) for words in _command_lines(judge.pid)):
            assert judge.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(3):  # at moments of which no two are in the same part of the judgement
            time.sleep(1.5)
            processes = [psutil.Process(judge.pid), *psutil.Process(judge.pid).children(recursive=True)]
            _signal(processes, signal.SIGSTOP)
            time.sleep(12)
            _signal(processes, signal.SIGCONT)
        out, errors = judge.communicate(timeout=900)
    assert json.loads(out)["status"] == "correct", (out, errors)


def _command_lines(pid: int) -> list[list[str]]:
    lines = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            lines.append(child.cmdline())
        except psutil.Error:
            continue
    return lines


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue
