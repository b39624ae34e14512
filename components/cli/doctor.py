"""The command `cuda-agent doctor`: report what this machine offers, what is missing, and the consequences.

The code of this file looks up the Python packages in the report without importing them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    home_of,
    print_table,
    with_common_options,
)
from components.core.errors import UserError, refuse

if TYPE_CHECKING:
    from rich.text import Text

    from components.core.config import Resolved
    from components.core.params import Params


# What does not work without a Python package, by the package's name.
PACKAGES = {
    "torch": "nothing can be judged or trained",
    "transformers": "no policy can be loaded or sampled",
    "deepspeed": "no stage can be trained; judging and evaluation work",
    "prefect": "no pipeline run; the components work one by one",
    "mlflow": "no tracking and no model registry",
    "dvc": "no data set can be built or restored",
    "boto3": "no artefact store in S3; a local folder works",
}

# Name of the finding on isolation.
ISOLATION = "isolation"
MIN_DISK_BYTES = 2**30
MIN_MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Finding:
    """Report on one part of the environment, such as a program or a Python package.

    `name` is that of the part, for example g++. `here` says whether the part is present, and `found`
    describes it. `cost` says what does not work without the part. `needed` says whether its absence is an
    error.
    """

    name: str
    here: bool
    found: str
    cost: str
    needed: bool = True


@with_common_options()
def doctor(options: CommonOptions) -> Output:
    """Report what this machine offers, what is missing, and what does not work without the missing parts.

    The exit code is 0 if no needed part is missing, 3 if only isolation is missing, and 2 otherwise.
    """
    findings = [replace(one, cost="") if one.here else one for one in examine(options.resolve())]
    print_table(
        ("", "what", "found", "what its absence costs"),
        [(_mark(finding), finding.name, finding.found, finding.cost) for finding in findings],
    )
    missing = [finding.name for finding in findings if finding.needed and not finding.here]
    code = ExitCode.NO_ISOLATION if missing == [ISOLATION] else ExitCode.BAD_INPUT
    return Output(
        {"findings": [asdict(finding) for finding in findings], "missing": missing},
        code if missing else ExitCode.DONE,
    )


def _mark(finding: Finding) -> Text:
    from rich.text import Text

    absent = ("missing", "red") if finding.needed else ("absent", "yellow")
    return Text(*(("ok", "green") if finding.here else absent))


def examine(resolved: Resolved) -> list[Finding]:
    """Return the findings on all parts of the environment, for the device and home in the parameters."""
    import psutil

    params, home = resolved.params, home_of(resolved)
    cuda = params.device == "cuda"
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    memory, cores = psutil.virtual_memory().available, len(os.sched_getaffinity(0))
    gpu = _first_line("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    files = any(Path("/").glob("usr/lib/*/libseccomp.so.2*"))
    library = find_library("seccomp") or ("libseccomp.so.2" if files else "")
    is_isolated = params.sandbox.isolation == "bubblewrap"
    return [
        Finding("python", sys.version_info >= (3, 11), sys.version.split()[0], "3.11 or newer is needed"),
        _program("g++", True, "no C++ kernel can be built, and torch.compile cannot be measured"),
        _program("nvcc", cuda, f"no CUDA kernel can be built{'' if cuda else ' (device cpu needs none)'}"),
        _program("ccache", False, "repeated builds of bindings take longer"),
        _program(
            "bwrap",
            is_isolated,
            "candidates cannot be isolated, so the judge refuses",
        ),
        Finding("libseccomp", bool(library), library, "system calls of candidates are not filtered"),
        _readable(ISOLATION, lambda: _isolation(params))
        if is_isolated
        else Finding(
            ISOLATION,
            here=False,
            found="",
            cost=f"switched off by sandbox.isolation: {params.sandbox.isolation}",
            needed=False,
        ),
        Finding("gpu", bool(gpu), gpu, "kernels are C++ on the CPU (device cpu)", needed=False),
        Finding(
            "cores", cores >= 2, str(cores), "building and measuring share one core: slower", needed=False
        ),
        Finding(
            "memory",
            memory > MIN_MEMORY_BYTES,
            f"{memory / 2**30:.0f} GiB available",
            "the smoke profile needs about 4 GiB",
            needed=False,
        ),
        Finding(
            "disk",
            free > MIN_DISK_BYTES and writable,
            f"{free / 2**30:.0f} GiB free at {home}",
            "a run may fail on a full disk; free some space or give another --home",
        ),
        _readable("policy", lambda: _policy(params)),
        _readable("pool", lambda: pool(params)),
        *(
            [_readable("samplers", lambda: samplers(params))]
            if params.policy.backend == "vllm-server"
            else []
        ),
        _readable("suite", lambda: _suite(params)),
        _readable("evaluation programs", lambda: _evaluation_programs(params)),
        *(_package(name, cost) for name, cost in PACKAGES.items()),
    ]


def _first_line(*command: str) -> str:
    """Return the first line that a command prints, or an empty string if the command fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def _program(name: str, needed: bool, cost: str) -> Finding:
    path = shutil.which(name) or ""
    return Finding(name, bool(path), _first_line(name, "--version") or path, cost, needed=needed)


def _package(name: str, cost: str) -> Finding:
    here = importlib.util.find_spec(name) is not None
    return Finding(
        name,
        here,
        importlib.metadata.version(name) if here else "",
        cost,
        needed=name != "boto3",
    )


def _readable(name: str, read: Callable[[], str]) -> Finding:
    """Return the report on the needed part `name` of the environment, which `read` checks.

    If `read` returns a text, the part is present, and the text describes it (`Finding.found`). If `read`
    raises UserError, the part is missing, and the error's message says what does not work (`Finding.cost`).
    """
    try:
        return Finding(name, True, read(), "", True)
    except UserError as error:
        return Finding(name, False, "", str(error), True)


def _policy(params: Params) -> str:
    from components.core.config import check_policy_source

    check_policy_source(params)
    return params.policy.source


def pool(params: Params) -> str:
    """Return a sentence that says where trainers and judges of these parameters run.

    Raises UserError if trainers, samplers or judges do not fit the memory of their GPUs, or if trainers or
    judges run on a Ray cluster and Ray is not installed or the cluster lacks resources.
    """
    from components.core.config import check_policy_source
    from components.planning.role_memory import check_fits

    trainers, judges = params.pool.trainers, params.pool.judges
    try:
        check_policy_source(params)
    except UserError:  # another finding names it
        pass
    else:
        check_fits(params)
    if not trainers and not judges:
        return "the process of the run trains and judges"
    refuse(
        (not importlib.util.find_spec("ray"), "pool: trainers and judges need Ray; install the extra ray.")
    )
    from components.planning.ray_cluster import check_capacity

    check_capacity(params)
    return f"the Ray cluster has room for {trainers} trainers and {judges} judges"


def samplers(params: Params) -> str:
    """Return a sentence on the vLLM servers that sample trajectories.

    If policy.servers names servers, it says that all of them answer a request within two seconds, and
    otherwise which vLLM a run starts. Raises UserError, which says how many answer, if one of the named
    servers does not answer, or if a run cannot start one of its own.
    """
    import httpx

    from components.policy.vllm.own_servers import check_own_servers
    from components.policy.vllm.server_client import server_addresses
    from components.policy.vllm.start import find_vllm

    if not params.policy.servers:
        check_own_servers(params)
        return f"a run starts {find_vllm(params.policy.vllm)}"
    urls = server_addresses(params.policy.servers)
    silent = list(urls)
    for url in urls:
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            if httpx.get(f"{url.rstrip('/')}/health", timeout=2).is_success:
                silent.remove(url)
    count = f"{len(urls) - len(silent)} of {len(urls)} vLLM servers answer"
    refuse(
        (
            silent,
            f"{count}; nothing can be sampled from {', '.join(silent)}; start them as docs/training.md says",
        )
    )
    return count


def _suite(params: Params) -> str:
    from components.evaluation.suites import HELD_OUT, load_suite

    suite = params.evaluation.suite
    return suite if suite == HELD_OUT else f"{suite}: {len(load_suite(params, Path()))} tasks"


def _evaluation_programs(params: Params) -> str:
    from components.synthesis.contamination import EvaluationPrograms

    count = len(EvaluationPrograms(params.data.against).programs)
    return f"training tasks stay clear of {count} programs" if count else "none given in data.against"


def _isolation(params: Params) -> str:
    """Start an isolated process in the same way as the judge, and return a text that says so.

    Raises IsolationUnavailable, which is a UserError, if that is not possible.
    """
    from components.sandbox.preflight import check_isolation

    check_isolation(params.sandbox, params.device)
    return "a runner was started, isolated and read"
