"""vec.h on a host: exact to a few units in the last place wherever the function is, and right at its ends."""

import ctypes
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernel_bench import FLAGS, WORKDIR
from torch import Tensor

INF, NAN = math.inf, math.nan
SPECIAL = (-INF, -1e38, -104.0, -1.0, -0.0, 0.0, 2e-38, 1e-30, 88.72284, 3.4e38, INF, NAN)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "vexp": (torch.exp, -86.6, 88.7228),
    "vlog": (torch.log, 2.0**-125, 3.4e38),
    "vlog1p": (torch.log1p, -1 + 2.0**-24, 3.4e38),
    "vsigmoid": (torch.sigmoid, -86.6, 100.0),
    "vtanh": (torch.tanh, -3e38, 3e38),
    "verf": (torch.erf, -3e38, 3e38),
}
"""What each has to be, and between which ends to the last digits: below 2^-125 a result may be 0."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("vec")
    loop = (
        '\nextern "C" void each_{0}(const float* x, float* out, int64_t n) {{\n  #pragma omp simd\n  for'
        " (int64_t i = 0; i < n; ++i) out[i] = {0}(x[i]);\n}}\n"
    )
    (folder / "all.cpp").write_text('#include "vec.h"' + "".join(loop.format(name) for name in FUNCTIONS))
    subprocess.run(["g++", *FLAGS, "-I", str(WORKDIR), "all.cpp", "-o", "all.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def each(library: ctypes.CDLL, name: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    getattr(library, f"each_{name}")(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(x.numel())
    )
    return out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_exact_to_four_units_in_the_last_place(library: ctypes.CDLL, name: str) -> None:
    exact, low, high = FUNCTIONS[name]
    sizes = torch.logspace(-44, 38.4, 400_000, dtype=torch.float64)
    x = torch.cat(
        [
            sizes,
            -sizes,
            torch.linspace(-20, 20, 400_000, dtype=torch.float64),
            torch.linspace(-90, 90, 200_000, dtype=torch.float64),
        ]
    ).float()
    x = x[(x >= low) & (x <= high)]
    expected = exact(x.double())
    unit = (
        torch.nextafter(expected.float().abs(), torch.tensor(INF)).double() - expected.float().abs().double()
    )
    assert ((each(library, name, x).double() - expected).abs() / unit).max() <= 4


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_right_at_its_ends(library: ctypes.CDLL, name: str) -> None:
    x = torch.tensor(SPECIAL)
    torch.testing.assert_close(
        each(library, name, x), FUNCTIONS[name][0](x), rtol=1e-6, atol=2.0**-125, equal_nan=True
    )


HALF_LOOPS = """#include "vec.h"
#define LOOPS(T) \\
  extern "C" void read_##T(const T* x, float* out, int64_t n) { \\
    for (int64_t i = 0; i < n; ++i) out[i] = x[i]; \\
  } \\
  extern "C" void write_##T(const float* x, T* out, int64_t n) { \\
    for (int64_t i = 0; i < n; ++i) out[i] = x[i]; \\
  }
LOOPS(f16)
LOOPS(bf16)
"""


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_is_read_and_rounded_as_by_torch(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    (tmp_path / "half.cpp").write_text(HALF_LOOPS)
    subprocess.run(["g++", *FLAGS, "-I", str(WORKDIR), "half.cpp", "-o", "half.so"], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "half.so"))

    def through(name: str, x: Tensor, out: Tensor) -> Tensor:
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        getattr(library, f"{name}_{kind}")(*pointers, ctypes.c_int64(x.numel()))
        return out

    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    read = through("read", every, torch.empty(2**16))
    torch.testing.assert_close(read, every.float(), rtol=0, atol=0, equal_nan=True)
    # Every number, what lies in the middle of two, and the floats beside the middle.
    middle = (read[:-1].double() + read[1:].double()).div(2).float()
    beside = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-INF, INF)]
    x = torch.cat([read, middle, *beside, torch.tensor(SPECIAL), torch.randn(2**16) * 1e5])
    written = through("write", x, torch.empty_like(x, dtype=dtype))
    torch.testing.assert_close(written, x.to(dtype), rtol=0, atol=0, equal_nan=True)
