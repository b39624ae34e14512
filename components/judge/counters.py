"""What the GPU's hardware counts in one call of a candidate, as Nsight Compute (the program ncu) reads it.

A candidate is an implementation of a task's module that is judged. ncu executes each kernel several times,
once for each group of counters, so the call is made in a sandboxed process of its own (counted_call.py) that
is never timed. Its figures explain a measured time and are no part of it: the candidate itself decides what
this process does.
"""

import csv
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.params import JudgeParams
from components.judge.candidate import BuiltCandidate
from components.judge.candidate_runner import own_inputs_header
from components.judge.task_reference import TaskReference
from components.sandbox import isolation
from components.sandbox.runner_factory import INSIDE_FOLDER
from components.sandbox.runner_process import wait_for_exit

# The figures of a kernel, each with the metrics of ncu whose sum it is. The percentages are of the highest
# rate that the hardware can sustain, except `occupancy_percent`, which is of the warps that fit on a
# multiprocessor. Local memory holds spilled registers, and arrays that are indexed by variables.
METRICS: dict[str, tuple[str, ...]] = {
    "nanoseconds": ("gpu__time_duration.sum",),
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    "local_accesses": ("smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum"),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
}
# The clocks are left as they are, because the judge's timed processes use the same GPU later.
OPTIONS = (
    *("--target-processes", "all", "--clock-control", "none", "--profile-from-start", "off"),
    *("--csv", "--page", "raw", "--print-units", "base"),
    *("--metrics", ",".join(metric for metrics in METRICS.values() for metric in metrics)),
)
# Largest number of kernels of a call whose figures are kept.
MAX_KERNELS = 16
# Largest part of ncu's report that is read, and largest file that the process may write, in bytes.
REPORT_BYTES, FILE_BYTES = 1 << 22, 1 << 28
# Address space of the process, which CUDA reserves far more of than it uses.
ADDRESS_BYTES = 1 << 46
# Folder in which NVIDIA's packages install Nsight Compute.
NSIGHT = Path("/opt/nvidia")


def find_ncu() -> str:
    """Return the path of ncu, from PATH or CUDA_HOME; raise UserError if there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if found := shutil.which("ncu") or shutil.which(f"{home}/bin/ncu"):
        return found
    raise UserError(
        "sandbox.counters: Nsight Compute's program ncu is neither in PATH nor in CUDA_HOME; install it "
        "(NVIDIA's package nsight-compute), or leave the counters out."
    )


def check_counters(params: JudgeParams) -> None:
    """Raise UserError if sandbox.counters is set and the counters cannot be read with these parameters."""
    if not params.sandbox.counters:
        return
    if params.device == "cpu":
        raise UserError("sandbox.counters: the device is cpu, and the counters are a GPU's; judge on cuda.")
    if params.sandbox.isolation == "none":
        raise UserError(
            "sandbox.counters: sandbox.isolation is none, and the counters are read in a sandbox only; set "
            "one of the two otherwise."
        )
    find_ncu()


def count(params: JudgeParams, reference: TaskReference, built: BuiltCandidate) -> dict[str, Any]:
    """Return what the GPU counts in one call of the candidate `built`, for the evidence of its verdict.

    `params` are the judge's settings, and `reference` has the data of the candidate's task. The inputs are
    those of the task's `get_inputs`. The result has `kernels`, the figures of the first `MAX_KERNELS` kernels
    of the call in their order (`METRICS`, and the kernel's name under `kernel`), and `launches`, the number
    of all. It has an `error` instead, a sentence, if the counters could not be read. On a GPU nothing else
    uses the device meanwhile. Raises UserError if there is no ncu.
    """
    ncu, seconds = find_ncu(), params.sandbox.run_seconds
    with tempfile.TemporaryDirectory(prefix="counters-", ignore_cleanup_errors=True) as name:
        given, out = Path(name, "in"), Path(name, "out")
        for folder in (Path(name), given, out):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)  # for the process, which has another uid if the judge is root
        if isolation.can_change_uid():
            os.chown(out, isolation.BUILDER, isolation.BUILDER)
        header = own_inputs_header(params, reference, built)
        (given / "header.json").write_text(json.dumps(header))
        (given / "library").write_bytes(built.library + built.triton_archive)
        native = reference.processes.factory.result_channel
        paths = isolation.python_paths() | {INSIDE_FOLDER: "/sandbox", native: "/native", given: "/in"}
        command = [
            *(ncu, *OPTIONS, "--log-file", "/out/report.csv", *isolation.interpreter()),
            paths.inside(INSIDE_FOLDER / "counted_call.py"),
            os.pathsep.join(map(paths.inside, isolation.package_folders())),
            *("/native", "/in"),
        ]
        tools = {NSIGHT: str(NSIGHT)} if NSIGHT.is_dir() else {}
        if not ncu.startswith("/usr/"):  # which every sandbox has
            tools[Path(ncu).parent] = str(Path(ncu).parent)
        confined = isolation.confined(
            command,
            device=params.device,
            paths=paths | tools,
            writable={"/out": out},
            variables={"TMPDIR": "/tmp", "HOME": "/tmp"},
            temporary_bytes=FILE_BYTES,
            memory_bytes=ADDRESS_BYTES,
            file_bytes=FILE_BYTES,
            seconds=seconds,
        )
        with confined as (words, filter_fd), reference.scheduler.measuring():
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=isolation.BUBBLEWRAP_ENVIRONMENT,
                pass_fds=(filter_fd,),
                start_new_session=True,
            )
            try:
                code = wait_for_exit(process, seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"Nsight Compute took longer than {seconds:g} s."}
        try:
            with open(os.open(out / "report.csv", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                report = file.read(REPORT_BYTES).decode(errors="replace")
        except OSError:
            return {"error": f"Nsight Compute ended with exit code {code} and wrote no report."}
    return read_report(report)


def read_report(report: str) -> dict[str, Any]:
    """Return the figures in a report of ncu; `count` says what the result has.

    The report has messages that begin with `==`, the names of columns, a line with their units, and a line
    for each kernel. A figure is None if a number is missing or is none.
    """
    rows = list(csv.DictReader(line for line in report.splitlines() if line.startswith('"')))[1:]
    if not rows:
        messages = [line for line in report.splitlines() if line.startswith("==ERROR==")]
        return {"error": (messages or ["Nsight Compute saw no kernel."])[0][:200]}
    kernels = [
        {"kernel": str(row.get("Kernel Name"))[:80]}
        | {name: _sum(row.get(metric) for metric in metrics) for name, metrics in METRICS.items()}
        for row in rows[:MAX_KERNELS]
    ]
    return {"kernels": kernels, "launches": len(rows)}


def _sum(texts: Any) -> float | None:
    try:
        return sum(float(str(text).replace(",", "")) for text in texts)
    except ValueError:
        return None
