"""Generation of CUDA kernels for operator chains in three styles.

The styles are one launch for each operator (`passes`), one fused kernel (`fused`), and one fused kernel with
wide memory accesses (`vector`).
"""

from components.bootstrap.chain_parser import OperatorChain
from components.bootstrap.kernel_templates_cpp import (
    CUDA_MATH,
    ROW,
    Reduction,
    elementwise,
    fuse_row,
    replace_functions,
)

BLOCK_OPERATION = """__device__ float block_{name}(float v) {{
  __shared__ float part[256];
  part[threadIdx.x] = v;
  for (int k = 128; k > 0; k /= 2) {{
    __syncthreads();
    if (threadIdx.x < k) part[threadIdx.x] = {combine};
  }}
  __syncthreads();
  v = part[0];
  __syncthreads();
  return v;
}}"""
WARP_OPERATION = """__device__ float block_{name}(float v) {{
  __shared__ float part[8];
  for (int k = 16; k > 0; k /= 2) v = {lane};
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = part[threadIdx.x % 8];
  for (int k = 4; k > 0; k /= 2) v = {lane};
  __syncthreads();
  return v;
}}"""
SHUFFLE = "__shfl_xor_sync(0xffffffff, v, k)"
COMBINE = {
    "sum": "part[threadIdx.x] + part[threadIdx.x + k]",
    "max": "fmaxf(part[threadIdx.x], part[threadIdx.x + k])",
}
# Lines of a kernel, and the line that launches it.
Kernel = tuple[list[str], str]
LANE = {"sum": f"v + {SHUFFLE}", "max": f"fmaxf(v, {SHUFFLE})"}


def parameters(chain: OperatorChain) -> str:
    tensors = ", ".join(f"{'' if name == 'out' else 'const '}float* {name}" for name in chain.tensors)
    return f"{tensors}, int64_t {'cols' if chain.by_row else 'n'}"


def launch(chain: OperatorChain, name: str, grid: str, shared: str = "0") -> str:
    tensors = ", ".join(f"f32(t[{index}])" for index in range(len(chain.tensors)))
    last = "t[0].size[1]" if chain.by_row else "t[0].numel"
    return f"  {name}<<<{grid}, 256, {shared}, (cudaStream_t)stream>>>({tensors}, {last});"


def element_kernel(chain: OperatorChain, name: str = "fused") -> Kernel:
    """Return a CUDA kernel that computes one element in each thread."""
    kernel = [
        f"__global__ void {name}({parameters(chain)}) {{",
        "  int64_t i = blockIdx.x * 256ll + threadIdx.x;",
        "  if (i < n) {",
        "    float v = x[i];",
        *(f"    {elementwise(step)}" for step in chain.steps),
        "    out[i] = v;",
        "  }",
        "}",
    ]
    return kernel, launch(chain, name, "(t[0].numel + 255) / 256")


def float4_kernel(chain: OperatorChain) -> Kernel:
    """Return a CUDA kernel that computes four elements as one float4 in each thread.

    This needs no remainder loop, because composed tasks have a multiple of 16 elements.
    """
    names = [name for name in chain.tensors if name in ("x", "y")]
    body = [f"    r.{lane} = chain(x4.{lane}{f', y4.{lane}' if 'y' in names else ''});" for lane in "xyzw"]
    kernel = [
        f"__device__ float chain(float v{', float y' if 'y' in names else ''}) {{",
        *(f"  {elementwise(step).replace('y[i]', 'y')}" for step in chain.steps),
        "  return v;",
        "}",
        f"__global__ void wide({parameters(chain)}) {{",
        "  int64_t i = blockIdx.x * 256ll + threadIdx.x;",
        "  if (i < n / 4) {",
        *(f"    const float4 {name}4 = ((const float4*){name})[i];" for name in names),
        "    float4 r;",
        *body,
        "    ((float4*)out)[i] = r;",
        "  }",
        "}",
    ]
    return kernel, launch(chain, "wide", "(t[0].numel / 4 + 255) / 256")


def loop(source: str, body: list[str]) -> list[str]:
    return [
        "  for (int64_t i = threadIdx.x; i < cols; i += 256) {",
        f"    float v = {source}[i];",
        *(f"    {line}" for line in body),
        "  }",
    ]


def sweep_lines(sweep: Reduction, source: str, body: list[str]) -> list[str]:
    """Return the CUDA lines of one sweep of a block over its row in the array `source`.

    `body` are the lines for each element. The accumulators of the threads are combined after the loop.
    """
    kind, names = sweep.clause.split(" : ")
    function = "block_max" if kind == "max" else "block_sum"
    return [
        *(f"  {line.replace('double', 'float')}" for line in sweep.declare),
        *loop(source, [line.replace("(double)", "") for line in body]),
        *(f"  {name} = {function}({name});" for name in names.split(", ")),
        *(f"  {line}" for line in sweep.finish),
    ]


def row_kernel(chain: OperatorChain, name: str = "rows") -> Kernel:
    """Return a CUDA kernel with one block for each row, which is kept in shared memory."""
    row = fuse_row(chain, sweep_lines)
    if row.tail:
        end = [*(f"  {line}" for line in row.tail), "  if (threadIdx.x == 0) out[blockIdx.x] = v;"]
    else:
        end = loop(row.source, [*row.pending, "out[blockIdx.x * cols + i] = v;"])
    kernel = [
        f"__global__ void {name}({parameters(chain)}) {{",
        "  extern __shared__ float b[];",
        "  const float* a = x + blockIdx.x * cols;",
        *(["  const float* s = y + blockIdx.x * cols;"] if "y" in chain.tensors else []),
        *row.lines,
        *end,
        "}",
    ]
    return kernel, launch(chain, name, "t[0].size[0]", "t[0].size[1] * sizeof(float)")


def separate_kernels(chain: OperatorChain) -> list[Kernel]:
    """Return one CUDA kernel for each operator, which pass their results in the output tensor.

    A reduction and the operators before it are one kernel, because the output tensor is too small for rows.
    """
    cut = next(
        (index + 1 for index, step in enumerate(chain.steps) if step.name in ROW and ROW[step.name].result),
        0,
    )
    groups = [chain.steps[:cut]] if cut else []
    kernels = []
    for index, group in enumerate([*groups, *((step,) for step in chain.steps[cut:])]):
        part = OperatorChain(group, chain.tensors)
        kernel, call = (row_kernel if part.by_row else element_kernel)(part, f"pass{index}")
        if index:
            call = call.replace("f32(t[0])", f"f32(t[{len(chain.tensors) - 1}])", 1)
            if cut:
                call = call.replace("t[0].numel", f"t[{len(chain.tensors) - 1}].numel")
        kernels.append((kernel, call))
    return kernels


def write_kernel(chain: OperatorChain, style: str) -> str:
    """Return the text of kernels/forward.cu for the chain in the style `passes`, `fused` or `vector`."""
    match style:
        case "passes":
            kernels, header = separate_kernels(chain), "#include <cmath>"
        case "fused":
            kernels, header = [(row_kernel if chain.by_row else element_kernel)(chain)], '#include "vec.h"'
        case "vector":
            kernels, header = [(row_kernel if chain.by_row else float4_kernel)(chain)], '#include "vec.h"'
        case _:
            raise ValueError(f"unknown style {style}")
    body = "\n".join(line for kernel, _ in kernels for line in kernel)
    template = WARP_OPERATION if style == "vector" else BLOCK_OPERATION
    used = [name for name in ("sum", "max") if f"block_{name}(" in body]
    functions = [template.format(name=name, combine=COMBINE[name], lane=LANE[name]) for name in used]
    lines = [*functions, body, "KERNEL(forward) {", *(call for _, call in kernels), "}"]
    if style == "passes":
        lines = [replace_functions(line, CUDA_MATH) for line in lines]
    return "\n".join(['#include "binding_registry.h"', header, *lines, ""])
