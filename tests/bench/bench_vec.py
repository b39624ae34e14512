"""Functions of vec.h in a loop, built as candidates are, against eager PyTorch and libm.

    python tests/bench/bench_vec.py [ANOTHER_VEC_H]

One line for each function: microseconds for 2^18 elements, and how many times as fast as eager, as libm in
the same loop, and as another version of the file.
"""

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from components.core.config import PROJECT
from components.sandbox.compilers import CPU_FLAGS, X86_FLAGS

NUMEL = 2**18
CALLS = 60
FUNCTIONS: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "exp": ("vexp(v)", "std::exp(v)", torch.exp),
    "log1p": ("vlog1p(v)", "std::log1p(v)", torch.log1p),
    "sigmoid": ("vsigmoid(v)", "1 / (1 + std::exp(-v))", torch.sigmoid),
    "tanh": ("vtanh(v)", "std::tanh(v)", torch.tanh),
    "erf": ("verf(v)", "std::erf(v)", torch.erf),
    "gelu": ("v * (1 + verf(v * 0.70710678f)) / 2", "v * (1 + std::erf(v * 0.70710678f)) / 2", F.gelu),
    "mish": ("v * vtanh(vlog1p(vexp(v)))", "v * std::tanh(std::log1p(std::exp(v)))", F.mish),
}


def least(call: Callable[[], object]) -> float:
    """Microseconds of the fastest of CALLS calls."""
    best = float("inf")
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


def library(header: Path, column: int, folder: Path) -> ctypes.CDLL:
    """A loop for each function: with `header` (column 0), or with libm (column 1)."""
    start = (
        'extern "C" __attribute__((visibility("default"))) void {}(const float* __restrict x, float*'
        " __restrict out, int64_t n) {{\n"
    )
    loop = (
        start + "#pragma omp simd\nfor (int64_t i = 0; i < n; ++i) {{ float v = x[i]; out[i] = {}; }}\n}}\n"
    )
    text = f'#include "{header.resolve()}"\n' + "".join(
        loop.format(f"each_{name}", forms[column]) for name, forms in FUNCTIONS.items()
    )
    made = folder / f"{column}{len(list(folder.iterdir()))}"
    made.with_suffix(".cpp").write_text(text)
    subprocess.run(
        ["g++", *CPU_FLAGS, *X86_FLAGS, "-shared", made.with_suffix(".cpp"), "-o", made.with_suffix(".so")],
        check=True,
    )
    return ctypes.CDLL(str(made.with_suffix(".so")))


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(NUMEL).abs()
    out = torch.empty_like(x)
    arguments = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(NUMEL))
    own = PROJECT / "agent_workdir" / "vec.h"
    with tempfile.TemporaryDirectory() as name:
        ways = {"libm": library(own, 1, Path(name))} | {
            path: library(Path(path), 0, Path(name)) for path in sys.argv[1:2]
        }
        ours = library(own, 0, Path(name))
        for function, (_, _, eager) in FUNCTIONS.items():
            took = least(lambda function=function: getattr(ours, f"each_{function}")(*arguments))
            others = {"eager": least(lambda eager=eager: eager(x))}
            others |= {
                way: least(lambda made=made, function=function: getattr(made, f"each_{function}")(*arguments))
                for way, made in ways.items()
            }
            print(
                f"{function:<8} {took:6.0f} us  "
                + "  ".join(f"{seconds / took:5.1f}x {way}" for way, seconds in others.items())
            )


if __name__ == "__main__":
    main()
