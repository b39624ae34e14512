"""The kinds of faults that campaign.py injects into a pipeline run and the services below it."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pipeline_process import PipelineRun

from components.core.config import PROJECT


def pid_of(stack: Path, service: str) -> int:
    return int((stack / f"{service}.pid").read_text())


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def again(stack: Path, service: str, **environment: str) -> None:
    command = [PROJECT / "infra" / "one-host.sh", "start", stack, service]
    subprocess.run(
        command,
        env=os.environ | environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill_below(root: int, *words: str) -> bool:
    """Kill one process below `root` whose command line has one of the words; False when there is none now."""
    below = psutil.Process(root).children(recursive=True) if psutil.pid_exists(root) else []
    for process in below:
        try:
            if any(word in part for word in words for part in process.cmdline()):
                process.kill()
                return True
        except psutil.Error:
            continue
    return False


def end_service(stack: Path, name: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself when what it stands on was killed
        os.killpg(pid_of(stack, name), signal.SIGKILL)
        while alive(pid_of(stack, name)):  # or who starts it again finds that it runs
            time.sleep(0.01)


def kill_service(*names: str) -> Callable[[PipelineRun, random.Random], bool]:
    """Killed all at once, and started again in their order after a while."""

    def fault(night: PipelineRun, chance: random.Random) -> bool:
        for name in names:
            end_service(night.stack, name)
        time.sleep(chance.uniform(0, 3))
        for name in names:
            again(night.stack, name)
        return True

    return fault


def skew_clock(night: PipelineRun, chance: random.Random) -> bool:
    """Start Prefect's server or MLflow with a clock minutes off. Only where libfaketime is installed."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        return False
    service = chance.choice(("prefect", "mlflow"))
    end_service(night.stack, service)
    again(
        night.stack,
        service,
        LD_PRELOAD=str(library),
        FAKETIME=f"{chance.uniform(-600, 600):+.0f}s",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )
    return True


def kill_night(night: PipelineRun, chance: random.Random) -> bool:
    os.kill(night.process, signal.SIGKILL)
    return True


def cut_store(night: PipelineRun, chance: random.Random) -> bool:
    """The object store hears nothing and says nothing for a while."""
    group = pid_of(night.stack, "s3")
    os.killpg(group, signal.SIGSTOP)
    time.sleep(chance.uniform(1, 6))
    os.killpg(group, signal.SIGCONT)
    return True


def fill_disk(night: PipelineRun, chance: random.Random) -> bool:
    """Only where the home has a file system of its own: others live on the machine's."""
    if not night.home.parent.is_mount():
        return False
    ballast = night.home.parent / "ballast"
    with ballast.open("wb") as file:
        status = os.fstatvfs(file.fileno())
        with contextlib.suppress(OSError):  # what the night wrote meanwhile filled it
            os.posix_fallocate(file.fileno(), 0, (status.f_bavail - 64) * status.f_frsize)
    time.sleep(chance.uniform(1, 4))
    ballast.unlink()
    return True


def judges(night: PipelineRun) -> int:
    """The process below which the judges are."""
    return pid_of(night.stack, "ray-node") if night.pool == "ray" else night.process


FAULTS: dict[str, Callable[[PipelineRun, random.Random], bool]] = {
    "the night's process killed": kill_night,
    "a runner of the judge killed": lambda night, _: kill_below(judges(night), "/sandbox/zygote.py"),
    "a compiler killed": lambda night, _: kill_below(judges(night), "cc1plus"),
    "DVC killed": lambda night, _: kill_below(night.process, "-m dvc", "dvc"),
    "the judge's Ray actor killed": lambda night, _: kill_below(
        pid_of(night.stack, "ray-node"), "ray::RayActor"
    ),
    "a Ray node killed": kill_service("ray-node"),
    "Ray's cluster killed": kill_service("ray-head", "ray-node"),
    "Prefect's server killed": kill_service("prefect"),
    "MLflow killed": kill_service("mlflow"),
    "PostgreSQL killed": kill_service("postgres"),
    "the object store killed": kill_service("s3"),
    "a server's clock minutes off": skew_clock,
    "the object store silent": cut_store,
    "the disk full": fill_disk,
}


def hand(night: PipelineRun, chance: random.Random) -> list[str]:
    """The faults of one night: every kind that means something to it twice, in a random order."""
    names = [name for name in FAULTS if night.pool == "ray" or "Ray" not in name] * 2
    chance.shuffle(names)
    return names
