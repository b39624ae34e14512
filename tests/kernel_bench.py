"""Builds many kernels into one library and calls them on numpy arrays: what the kernel tests need, without the judge."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor, nn

WORKDIR = Path(__file__).resolve().parent.parent / "agent_workdir"
FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-std=c++17",
    "-fPIC",
    "-shared",
]
# Without this a second library in the same process shares the first one's table of kernels.
FLAGS += ["-fno-gnu-unique"]
CALL = """
extern "C" void call(int64_t index, void** data, const int64_t* rows, const int64_t* cols, int64_t count) {
  std::vector<TensorView> t(count);
  for (int64_t i = 0; i < count; ++i) {
    t[i].data = data[i];
    t[i].dim = rows[i] ? 2 : 1;
    t[i].numel = (rows[i] ? rows[i] : 1) * cols[i];
    t[i].size[0] = rows[i] ? rows[i] : cols[i];
    t[i].size[1] = cols[i];
  }
  kernel_entries()[index].function(t.data(), count, nullptr);
}
"""


def build(kernels: list[str], folder: Path) -> ctypes.CDLL:
    """One library with every kernel in a namespace of its own, in order."""
    text = '#include "binding_registry.h"\n#include "vec.h"\n#include <cmath>\n#include <algorithm>\n'
    for index, kernel in enumerate(kernels):
        body = "\n".join(line for line in kernel.splitlines() if not line.startswith("#include"))
        text += f"namespace kernel{index} {{\n{body}\n}}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "all.cpp").write_text(text + CALL)
    subprocess.run(
        ["g++", *FLAGS, "-I", str(WORKDIR), str(folder / "all.cpp"), "-o", str(folder / "all.so")],
        check=True,
        capture_output=True,
        text=True,
    )
    return ctypes.CDLL(str(folder / "all.so"))


def call(library: ctypes.CDLL, index: int, tensors: list[Tensor]) -> None:
    """Run kernel `index` on contiguous float32 tensors of one or two dimensions."""
    count = len(tensors)
    numbers = ctypes.c_int64 * count
    data = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in tensors))
    rows = numbers(*(tensor.shape[0] if tensor.dim() == 2 else 0 for tensor in tensors))
    library.call(
        ctypes.c_int64(index),
        data,
        rows,
        numbers(*(tensor.shape[-1] for tensor in tensors)),
        ctypes.c_int64(count),
    )


@torch.no_grad()
def reference(code: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """The kernel's arguments without the output, the float32 output and the float64 output of a task that we composed."""
    namespace: dict[str, object] = {}
    exec(code, namespace)
    torch.manual_seed(1)
    model: nn.Module = namespace["Model"]()
    inputs: list[Tensor] = namespace["get_inputs"]()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter))
    expected = model(*inputs)
    arguments = [*inputs, *(value.clone() for value in model.state_dict().values())]
    return arguments, expected, model.double()(*(value.double() for value in inputs))
