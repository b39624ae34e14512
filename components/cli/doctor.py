"""What is here, what is missing, and what that costs. Imports none of what it looks for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from components.core.config import Params

NEEDED_PYTHON = (3, 11)
PACKAGES = {
    "torch": "nothing can be judged or trained",
    "transformers": "no policy can be loaded or sampled",
    "deepspeed": "no stage can be trained; judging and evaluation work",
    "prefect": "no nightly run; the components work one by one",
    "mlflow": "no tracking and no model registry",
    "dvc": "no data set can be built or restored",
    "boto3": "no artifact store in S3; a local folder works",
    "vllm": "sampling uses transformers in this process; vLLM belongs into an environment of its own",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked for. `cost` says what its absence costs and is empty when it is here."""

    name: str
    here: bool
    found: str
    cost: str
    needed: bool


def _first_line(*command: str) -> str:
    """The first line that a command prints; empty when it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def _program(name: str, needed: bool, cost: str, *version: str) -> Finding:
    path = shutil.which(name)
    return Finding(
        name,
        path is not None,
        (_first_line(name, *(version or ("--version",))) or path) if path else "",
        "" if path else cost,
        needed,
    )


def _package(name: str, cost: str) -> Finding:
    here = importlib.util.find_spec(name) is not None
    version = importlib.metadata.version(name) if here else ""
    return Finding(name, here, version, "" if here else cost, name not in ("vllm", "boto3"))


ISOLATION = "isolation"


def _isolation(params: Params) -> Finding:
    """Whether a runner can be started and isolated here, by starting one as the judge does."""
    if params.sandbox.isolation != "bubblewrap":
        return Finding(
            ISOLATION, False, "", f"switched off by sandbox.isolation: {params.sandbox.isolation}", False
        )
    from components.core.errors import IsolationUnavailable
    from components.sandbox.preflight import check_isolation

    try:
        check_isolation(params.sandbox, params.device)
    except IsolationUnavailable as error:
        return Finding(ISOLATION, False, "", str(error), True)
    return Finding(ISOLATION, True, "a runner was started, isolated and read", "", True)


def _gpu() -> Finding:
    name = _first_line("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return Finding("gpu", bool(name), name, "" if name else "kernels are C++ on the CPU (device cpu)", False)


def _disk(home: Path) -> Finding:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    writable = os.access(place, os.W_OK)
    cost = (
        ""
        if free > 2**30 and writable
        else "a run may stop for want of room; free some or give another --home"
    )
    return Finding("disk", free > 2**30 and writable, f"{free / 2**30:.0f} GiB free at {home}", cost, True)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    enough = free > 4 * 2**30
    return Finding(
        "memory",
        enough,
        f"{free / 2**30:.0f} GiB available",
        "" if enough else "the smoke run wants about 4 GiB",
        False,
    )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding(
        "cores",
        cores >= 2,
        str(cores),
        "" if cores >= 2 else "building and measuring share one core: slower",
        False,
    )


def _seccomp() -> Finding:
    library = find_library("seccomp") or (
        "libseccomp.so.2" if any(Path("/").glob("usr/lib/*/libseccomp.so.2*")) else ""
    )
    return Finding(
        "libseccomp",
        bool(library),
        library or "",
        "" if library else "system calls of candidates are not filtered",
        True,
    )


def examine(params: Params) -> list[Finding]:
    """Every finding, for the device and home of these parameters."""
    cuda = params.device == "cuda"
    python = sys.version_info >= NEEDED_PYTHON
    return [
        Finding("python", python, sys.version.split()[0], "" if python else "3.11 or newer is needed", True),
        _program("g++", True, "no C++ kernel can be built, and torch.compile cannot be measured"),
        _program(
            "nvcc",
            cuda,
            "no CUDA kernel can be built" if cuda else "no CUDA kernel can be built (device cpu needs none)",
        ),
        _program("ccache", False, "repeated builds of bindings take longer"),
        _program(
            "bwrap",
            params.sandbox.isolation == "bubblewrap",
            "candidates cannot be isolated, so the judge refuses",
        ),
        _seccomp(),
        _isolation(params),
        _gpu(),
        _cores(),
        _memory(),
        _disk(Path(params.home).expanduser().resolve()),
        *(_package(name, cost) for name, cost in PACKAGES.items()),
    ]


def as_record(findings: list[Finding]) -> dict[str, Any]:
    """The JSON form: every finding, and the names of what is needed and missing."""
    return {
        "findings": [asdict(finding) for finding in findings],
        "missing": [finding.name for finding in findings if finding.needed and not finding.here],
    }
