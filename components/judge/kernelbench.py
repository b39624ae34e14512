"""A function with the signature of KernelBench's `eval_kernel_against_ref`, which calls the judge.

Code that calls KernelBench needs only another import:

    from components.judge.kernelbench import eval_kernel_against_ref

A candidate is judged by KernelBench's rules (docs/judge.md): it may compute with torch, it gets its weights
by constructing them under the same seed as the task, and KernelBench's tolerances apply. Seeds, numbers of
trials and the method of timing are the judge's own, so these arguments are accepted and not used.
"""

import atexit
import functools
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from components.core.records import FrozenModel
from components.core.task import KernelTask, check_contract
from components.judge.judge import Judge
from components.judge.statistics import net
from components.judge.verdict import Verdict

# Labels of KernelBench's own evaluation, and few rounds, as in `cuda-agent judge`.
SETTINGS = (
    *("sandbox.rules=any", "sandbox.weights=seed", "sandbox.tolerance=kernelbench"),
    *("sandbox.rounds=5", "sandbox.most_rounds=20"),
)
# Statuses of a candidate that KernelBench would not call compiled.
NOT_COMPILED = ("build_failed", "load_failed", "forbidden")


class KernelExecResult(FrozenModel):
    """Result with the fields of KernelBench's record of this name; times are in milliseconds.

    A time is -1 if it was not measured. `metadata` has the hardware, the messages of a failure under
    KernelBench's keys, and the whole verdict, with intervals and labels, under `verdict`.
    """

    compiled: bool = False
    correctness: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    runtime: float = -1.0
    runtime_stats: dict[str, Any] = Field(default_factory=dict)
    ref_runtime: float = -1.0
    ref_runtime_stats: dict[str, Any] = Field(default_factory=dict)


@functools.cache
def _judge(device: str) -> Judge:
    params = resolve("smoke", (f"device={device}", *SETTINGS)).params
    judge = Judge(params, Path(PROJECT, params.home, "judge"))
    atexit.register(judge.close)
    return judge


def eval_kernel_against_ref(
    original_model_src: str,
    custom_model_src: str,
    seed_num: int = 42,
    num_correct_trials: int = 1,
    num_perf_trials: int = 10,
    measure_performance: bool = False,
    timing_method: str = "cuda_event",
    verbose: bool = False,
    build_dir: str | os.PathLike[str] | None = None,
    device: torch.device | int | str | None = None,
    backend: str = "cuda",
    precision: torch.dtype = torch.float32,
    check_for_excessive_speedup: bool = True,
    excessive_speedup_threshold: float = 10,
) -> KernelExecResult | None:
    """Judge a kernel, the source of a file with `ModelNew`, against a task, and return KernelBench's record.

    The kernel is judged on cpu if `device` is `cpu` or torch finds no GPU, and otherwise on cuda. The record
    has times only if `measure_performance` is set. In this case, and if `check_for_excessive_speedup` is set,
    `metadata` gets the entry `excessive_speedup` if the speed-up over eager is larger than
    `excessive_speedup_threshold`. If `verbose` is set, status, reason and log are printed.

    Returns None if the judge itself failed, which for KernelBench means to try again. Raises UserError if the
    task cannot be judged, or if `backend` or `precision` is one that the judge does not support here.
    """
    if backend != "cuda":
        raise UserError(f"backend: {backend} is not judged; give cuda, with load_inline sources.")
    if precision != torch.float32:
        raise UserError(f"precision: {precision} is not set here; write the task's own source in that type.")
    check_contract(original_model_src, "original_model_src")
    on_cpu = str(device) == "cpu" or not torch.cuda.is_available()
    verdict = _judge("cpu" if on_cpu else "cuda").verdict(
        KernelTask(code=original_model_src), {"model_new.py": custom_model_src}
    )
    if verbose:
        print(f"[Eval] {verdict.status} {verdict.reason} {verdict.log}")
    if verdict.status == "infrastructure":
        if verdict.reason in ("task", "too_large"):
            raise UserError(f"original_model_src: {verdict.log}")
        return None
    return _result(
        verdict, measure_performance, excessive_speedup_threshold if check_for_excessive_speedup else None
    )


def _result(verdict: Verdict, measured: bool, threshold: float | None) -> KernelExecResult:
    compiled, correct = verdict.status not in NOT_COMPILED, verdict.status == "correct"
    # The seeds stay secret, because later candidates of the task get inputs from the same seeds.
    metadata: dict[str, Any] = {
        "hardware": verdict.evidence.get("device", ""),
        "device": verdict.device,
        "verdict": verdict.model_dump(mode="json", exclude={"evidence": {"seeds"}}),
    }
    if not compiled:
        metadata["compilation_error"] = verdict.log
    elif verdict.status == "wrong_output":
        metadata["correctness_issue"] = verdict.reason
    elif not correct:
        metadata["runtime_error"] = verdict.log
    if not (measured and correct):
        return KernelExecResult(compiled=compiled, correctness=correct, metadata=metadata)
    ratio = verdict.speedup.eager
    if threshold is not None and ratio is not None and ratio.estimate > threshold:
        metadata["excessive_speedup"] = True
    own, reference = (_stats(verdict, name) for name in ("candidate", "eager"))
    return KernelExecResult(
        compiled=True,
        correctness=True,
        metadata=metadata,
        runtime=1e3 * (verdict.seconds.candidate or 0.0),
        runtime_stats=own,
        ref_runtime=1e3 * (verdict.seconds.eager or 0.0),
        ref_runtime_stats=reference,
    )


def _stats(verdict: Verdict, name: str) -> dict[str, Any]:
    """Return KernelBench's statistics, in milliseconds, of the rounds of the runner `name`.

    The runner is `candidate` or `eager`. The no-op's time is subtracted.
    """
    raw = verdict.evidence["raw_seconds"]
    samples = [1e3 * float(value) for value in net(raw[name], raw["noop"])]
    return {
        "mean": statistics.fmean(samples),
        "std": statistics.stdev(samples),
        "min": min(samples),
        "max": max(samples),
        "num_trials": len(samples),
        "hardware": verdict.evidence["device"],
        "device": verdict.device,
    }
