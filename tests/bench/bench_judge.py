"""Evaluations per hour of the judge against the naive cycle, and its latency by phase, in one run.

The naive cycle is what the public workspace does for each candidate: a fresh Python that builds the kernel
with `torch.utils.cpp_extension.load` (headers of torch), checks five inputs, then times eager,
torch.compile and the candidate ten times each. Both judge the same kernel on the same task; the judge
measures torch.compile for it too.

    python tests/bench/bench_judge.py [--device cuda]

How true its figures are: judge_validity.py.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from components.core.config import PROJECT, resolve
from components.core.task import KernelTask, load_task
from components.judge import measurement
from components.judge.candidate import read_workspace
from components.judge.judge import Judge
from components.judge.timed_runner import TimedRunner
from components.sandbox.build import Builder

TEMPLATE = PROJECT / "agent_workdir"
REPEATS = 8
IN_FLIGHT = 16

HEAD = """
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
"""
CPU_BINDING = """
#include "vec.h"
static void forward(torch::Tensor a, torch::Tensor b, torch::Tensor alpha, torch::Tensor out) {
  const float *x = a.data_ptr<float>(), *y = b.data_ptr<float>();
  const float s = alpha.data_ptr<float>()[0];
  float* o = out.data_ptr<float>();
  #pragma omp simd
  for (int64_t i = 0; i < a.numel(); ++i) o[i] = s * vsigmoid(x[i]) + y[i];
}
PYBIND11_MODULE(cuda_extension, m) { m.def("forward", &forward); }
"""
CUDA_BINDING = """
#include <c10/cuda/CUDAStream.h>
void launch(const float* a, const float* b, const float* alpha, float* out, int64_t count,
            cudaStream_t stream);
static void forward(torch::Tensor a, torch::Tensor b, torch::Tensor alpha, torch::Tensor out) {
  launch(a.data_ptr<float>(), b.data_ptr<float>(), alpha.data_ptr<float>(), out.data_ptr<float>(),
         a.numel(), c10::cuda::getCurrentCUDAStream());
}
PYBIND11_MODULE(cuda_extension, m) { m.def("forward", &forward); }
"""
CUDA_KERNEL = """
#include <cstdint>
__global__ void fused(const float* a, const float* b, const float* alpha, float* out, int64_t count) {
  const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < count) out[i] = alpha[0] / (1.0f + __expf(-a[i])) + b[i];
}
void launch(const float* a, const float* b, const float* alpha, float* out, int64_t count,
            cudaStream_t stream) {
  fused<<<(count + 255) / 256, 256, 0, stream>>>(a, b, alpha, out, count);
}
"""
SOURCES = {
    "cpu": {"binding.cpp": HEAD + CPU_BINDING},
    "cuda": {"binding.cpp": HEAD + CUDA_BINDING, "forward.cu": CUDA_KERNEL},
}
NAIVE = """
import sys, time, torch
from torch.utils.cpp_extension import load
torch.set_num_threads(1)
device, include, *sources = sys.argv[1:]
load(name="cuda_extension", sources=sources, build_directory=".",
     extra_cflags=["-O3", "-march=native", "-fopenmp-simd", "-I" + include])
sys.path.insert(0, ".")
import model, model_new
old, new = (kind(*model.get_init_inputs()).eval().to(device) for kind in (model.Model, model_new.ModelNew))
new.load_state_dict(old.state_dict())
with torch.no_grad():
    for _ in range(5):
        inputs = [value.to(device) for value in model.get_inputs()]
        torch.testing.assert_close(new(*inputs), old(*inputs), atol=1e-2, rtol=1e-2)
    for call in (new, old, torch.compile(old)):
        for _ in range(15):
            call(*inputs)
            if device == "cuda":
                torch.cuda.synchronize()
"""


def naive_seconds(device: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("model.py", "model_new.py"):
            Path(folder, name).write_text((TEMPLATE / name).read_text())
        for name, text in SOURCES[device].items():
            Path(folder, name).write_text(text)
        Path(folder, "naive.py").write_text(NAIVE)
        environment = os.environ | {
            "HOME": folder,
            "OMP_NUM_THREADS": "1",
            "CCACHE_DISABLE": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        started = time.perf_counter()
        command = [sys.executable, "naive.py", device, str(TEMPLATE), *SOURCES[device]]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        return time.perf_counter() - started


PHASES: dict[str, tuple[Any, str]] = {
    "build": (Builder, "build"),
    "start and load": (TimedRunner, "__init__"),
    "verify and warm up": (TimedRunner, "round"),
    "timed phases": (measurement, "timed_rounds"),
    "all": (Judge, "verdict"),
}


def timed(record: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            record.append(time.perf_counter() - started)

    return wrapper


def latency(judge: Judge, task: KernelTask, files: dict[str, str], count: int, in_flight: int) -> list[float]:
    """Evaluate `count` new kernels, `in_flight` at a time; print p50 and p95 of each phase."""
    records: dict[str, list[float]] = defaultdict(list)
    originals = {name: getattr(owner, method) for name, (owner, method) in PHASES.items()}
    for name, (owner, method) in PHASES.items():
        setattr(owner, method, timed(records[name], originals[name]))

    def one(number: int) -> None:
        fresh = {
            name: f"{text}// {in_flight} {number}\n" if name.startswith("kernels/") else text
            for name, text in files.items()
        }  # built anew
        verdict = judge.verdict(task, fresh, compare_compile=True)
        assert verdict.status == "correct", verdict

    try:
        with ThreadPoolExecutor(in_flight) as executor:
            list(executor.map(one, range(count)))
    finally:
        for name, (owner, method) in PHASES.items():
            setattr(owner, method, originals[name])
    parts = [
        f"{name} {np.quantile(seconds, 0.5):.3f} / {np.quantile(seconds, 0.95):.3f}"
        for name, seconds in records.items()
    ]
    print(f"{in_flight} in flight, seconds p50 / p95: {', '.join(parts)}", flush=True)
    return records["all"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    task, files = load_task(TEMPLATE / "model.py"), read_workspace(TEMPLATE)
    naive = naive_seconds(device)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(resolve("smoke", (f"device={device}",)).params, Path(folder))
        judge.verdict(
            task, files, compare_compile=True
        )  # the zygote, the binding and the task's baselines: once per night and task
        seconds = latency(judge, task, files, REPEATS, 1)
        started = time.perf_counter()
        latency(judge, task, files, IN_FLIGHT, IN_FLIGHT)
        together = (time.perf_counter() - started) / IN_FLIGHT
        judge.close()
    own = sorted(seconds)[REPEATS // 2]
    spread = (
        f"median of {REPEATS}, {min(seconds):.2f} to {max(seconds):.2f}; {together:.2f} s each with"
        f" {IN_FLIGHT} in flight"
    )
    ratios = (
        f"{naive / own:.1f} times as many evaluations an hour, {naive / together:.1f} times with {IN_FLIGHT}"
        " in flight"
    )
    print(f"judge {own:.2f} s ({spread}), naive cycle {naive:.2f} s: {ratios}", flush=True)


if __name__ == "__main__":
    main()
