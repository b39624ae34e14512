"""Surroundings of ordinary users: commands pass, or end in one sentence that names the remedy."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import judge_fixtures as corpus
import pytest
from surroundings import Surroundings, run

from components.core import files
from components.core.config import PROJECT, resolve
from components.core.errors import InfrastructureError, IsolationUnavailable, UserError
from components.core.files import remove_tree, scratch_folder, user_cache
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.judge import Judge
from components.sandbox import preflight, runner_factory
from components.sandbox.build import build_result_channel
from components.sandbox.preflight import System, explain
from components.sandbox.runner_factory import RunnerFactory

CLI = [sys.executable, "-m", "components.cli"]
KEPT = {str(PROJECT): str(PROJECT)}
"""The checkout as a mount of its own, so that it may lie in /tmp, whose mount a test changes."""


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    lines = done.stderr.splitlines()
    assert done.returncode == code and len(lines) == 1, (done.returncode, done.stderr)
    assert lines[0].startswith("cuda-agent: ")
    return lines[0]


SERVER = "http://127.0.0.1:9/v1"
COMMANDS = (
    ("judge", "agent_workdir"),
    ("run", "--profile", "ci"),
    ("evaluate", "--profile", "ci", "--policy", SERVER, "--suite", "shipped"),
    ("data", "build", "--profile", "ci", "--out", "OUT"),
    ("optimize", "docs/examples/learned_gain.py", "--policy", SERVER),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_where_user_namespaces_are_switched_off_every_command_says_so_at_once(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    around = Surroundings(settings={"user/max_user_namespaces": "0"})
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    said = one_sentence(run([*CLI, *words, "--home", str(tmp_path)], around, PROJECT, seconds=150), code=3)
    assert "sysctl -w user.max_user_namespaces" in said
    assert not list(tmp_path.glob("stages/*")) and not list(tmp_path.glob("datasets/*")), "no work was spent"


def test_where_a_container_refuses_namespaces_the_mend_is_the_containers(tmp_path: Path) -> None:
    around = Surroundings(refused=("unshare", "mount", "setns", "pivot_root", "umount2"))
    said = one_sentence(
        run([*CLI, "judge", "agent_workdir", "--home", str(tmp_path)], around, PROJECT, seconds=150), code=3
    )
    assert "seccomp=unconfined" in said and "infra/prefect/kubernetes.json" in said
    doctor = run([*CLI, "doctor", "--json"], around, PROJECT, seconds=150)
    found = {finding["name"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert not found["isolation"]["here"] and "seccomp=unconfined" in found["isolation"]["cost"]
    assert doctor.returncode == 3


@pytest.mark.parametrize(
    ("files", "said", "root", "remedy"),
    [
        (
            {"proc/sys/user/max_user_namespaces": "0"},
            "bwrap: No space left",
            False,
            "user.max_user_namespaces=15000",
        ),
        (
            {"proc/sys/kernel/unprivileged_userns_clone": "0"},
            "bwrap: No permissions to create new namespace",
            False,
            "unprivileged_userns_clone=1",
        ),
        (
            {"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "bwrap: setting up uid map: Permission denied",
            False,
            "infra/apparmor/bwrap",
        ),
        (
            {"proc/self/status": "Name:\tpython\nSeccomp:\t2\n"},
            "bwrap: Creating new namespace failed: Operation not permitted",
            True,
            "seccomp=unconfined",
        ),
        (
            {"proc/sys/kernel/yama/ptrace_scope": "3"},
            "reading a runner's memory: refused",
            False,
            "ptrace_scope",
        ),
        (
            {"proc/self/status": "Seccomp:\t0\n"},
            "bwrap: Creating new namespace failed: Operation not permitted",
            True,
            "SYS_ADMIN",
        ),
        (
            {"proc/self/status": "Seccomp:\t0\n"},
            "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
            False,
            "procMount: Unmasked",
        ),
        ({}, "bwrap: something new", False, "something new"),
    ],
)
def test_each_case_has_its_own_mend(
    files: dict[str, str], said: str, root: bool, remedy: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sentence = explain(said, root=root, system=System(tmp_path))
    assert remedy in sentence and said in sentence and "\n" not in sentence
    others = {
        "user.max_user_namespaces=15000",
        "unprivileged_userns_clone=1",
        "infra/apparmor/bwrap",
        "ptrace_scope",
        "add the capabilities",
        "procMount: Unmasked",
    }
    assert sum(other in sentence for other in others) <= 1, "one remedy, that of this very case"


def test_an_old_bubblewrap_is_named_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(IsolationUnavailable, match=r"bubblewrap 0\.6 is too old"):
        preflight.check_installed()


def test_another_users_cache_is_neither_used_nor_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (user_cache("binding") / "made").write_text("by the first user")
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match=r"binding: belongs to another user \(uid \d+\).*XDG_CACHE_HOME"):
        user_cache("binding")


def test_a_cache_that_cannot_be_made_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda-agent").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be made .*XDG_CACHE_HOME"):
        user_cache("binding")


def test_a_home_whose_programs_cannot_be_loaded_is_one_sentence(outside_tmp: Path) -> None:
    home = outside_tmp / "home"
    home.mkdir()
    done = run(
        [*CLI, "judge", "agent_workdir", "--home", str(home)],
        Surroundings(noexec=(str(home),)),
        PROJECT,
        seconds=150,
    )
    assert "noexec" in one_sentence(done, code=2) and "--home" in done.stderr


def test_scratch_folders_avoid_a_place_without_execution() -> None:
    print_it = "from components.core.files import scratch_folder; print(scratch_folder())"
    done = run([sys.executable, "-c", print_it], Surroundings(bound=KEPT, noexec=("/tmp",)), PROJECT)
    assert done.stdout.strip() == str(user_cache("tmp")), done.stderr
    assert scratch_folder() == Path(tempfile.gettempdir())


def test_folders_that_are_closed_to_their_owner_are_removed_and_links_not_followed(tmp_path: Path) -> None:
    kept, inner = tmp_path / "kept", tmp_path / "made" / "a" / "b"
    kept.mkdir(0o500)
    inner.mkdir(parents=True)
    (inner / "file").write_text("")
    (tmp_path / "made" / "link").symlink_to(kept)
    for path in (inner, inner.parent):
        path.chmod(0)
    remove_tree(tmp_path / "made")
    assert not (tmp_path / "made").exists() and stat.S_IMODE(kept.stat().st_mode) == 0o500


def test_a_zygote_that_cannot_start_is_told_with_its_log(
    ci_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started again and again before, and only the clock told."""
    sources = tmp_path / "sources"
    shutil.copytree(runner_factory.INSIDE_FOLDER, sources)
    with (sources / "runner.py").open("a") as file:
        file.write("\nraise RuntimeError('no compiler here')\n")
    monkeypatch.setattr(runner_factory, "INSIDE_FOLDER", sources)
    runners = RunnerFactory(ci_params.sandbox, "cpu", tmp_path / "home", build_result_channel())
    try:
        with pytest.raises(InfrastructureError, match="no compiler here"):
            runners.spawn({"role": "noop"}, seconds=30)
        with pytest.raises(UserError, match=r"plain\.log: .*no compiler here.*run the same command again"):
            runners.spawn({"role": "noop"}, seconds=30)
    finally:
        runners.close()


def test_few_descriptors_keep_fewer_tasks_warm(tmp_path: Path) -> None:
    count = (
        "import sys; from pathlib import Path; from components.core.config import resolve\n"
        "from components.judge.judge import Judge\n"
        "judge = Judge(resolve('smoke').params, Path(sys.argv[1]))\n"
        "print(judge.bench_cache.capacity); judge.close()"
    )
    done = run(
        [sys.executable, "-c", count, str(tmp_path)], Surroundings(limits={"RLIMIT_NOFILE": 1024}), PROJECT
    )
    assert 1 <= int(done.stdout) < resolve("smoke").params.sandbox.warm_tasks, done.stderr


def test_a_warm_task_holds_no_more_descriptors_than_are_counted_for_it(judge: Judge) -> None:
    from components.judge.judge import TASK_DESCRIPTORS

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    other = KernelTask(code=corpus.CODE.replace("- 0.3", "- 0.4"))  # a copy would keep the cached task_id
    kernel = {name: text.replace("0.3f", "0.4f") for name, text in corpus.files("honest", "simd").items()}
    judge.verdict(
        corpus.TASK, corpus.files("honest", "simd"), compare_compile=True
    )  # what all tasks share is there now
    before = descriptors()
    assert judge.verdict(other, kernel, compare_compile=True).status == "correct"
    assert 0 < descriptors() - before <= TASK_DESCRIPTORS


@pytest.mark.parametrize(
    ("manager", "remedy"),
    [
        ("", "package manager of this system"),
        ("dnf", "sudo dnf install -y bubblewrap gcc-c++"),
        ("pacman", "sudo pacman -S"),
    ],
)
def test_without_apt_and_sudo_the_missing_packages_are_named(
    manager: str, remedy: str, tmp_path: Path
) -> None:
    for name in ("bash", "sed", "grep", "id", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    if manager:
        (tmp_path / manager).symlink_to("/bin/true")
    script = [str(PROJECT / ".ci" / "system-packages")]
    done = subprocess.run(
        ["/bin/bash", *script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and remedy in done.stderr, done.stderr
    assert "missing: bubblewrap g++" in done.stderr


def test_nothing_waits_for_a_package_that_only_saves_time(tmp_path: Path) -> None:
    for name in ("bash", "sed", "grep", "id", "env", "bwrap", "g++"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        ["/bin/bash", str(PROJECT / ".ci" / "system-packages")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
