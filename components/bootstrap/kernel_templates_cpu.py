"""Generation of C++ kernels for operator chains in three styles.

The styles are one loop for each operator (`passes`), fused loops (`fused`), and vectorised fused loops
(`simd`).
"""

from functools import partial

from components.bootstrap.chain_parser import OperatorChain, Step
from components.bootstrap.kernel_templates_cpp import (
    LIBM,
    ROW,
    Reduction,
    elementwise,
    fuse_row,
    replace_functions,
)

COLUMN_LOOP = "for (int64_t i = 0; i < cols; ++i) {"


def arguments(chain: OperatorChain) -> list[str]:
    """Return the C++ declarations of the kernel's tensors and, if needed, of the size of the input."""
    return [
        *(
            f"  {'' if name == 'out' else 'const '}float* {name} = f32(t[{index}]);"
            for index, name in enumerate(chain.tensors)
        ),
        *(["  const int64_t rows = t[0].size[0], cols = t[0].size[1];"] if chain.by_row else []),
    ]


def fused_elements(chain: OperatorChain, vectorised: bool) -> list[str]:
    """Return the C++ lines of one loop over all elements, for a chain of elementwise operators."""
    pragma = ["  #pragma omp simd"] if vectorised else []
    return [
        *pragma,
        "  for (int64_t i = 0; i < t[0].numel; ++i) {",
        "    float v = x[i];",
        *(f"    {elementwise(step)}" for step in chain.steps),
        "    out[i] = v;",
        "  }",
    ]


def loop(clause: str, source: str, body: list[str], vectorised: bool) -> list[str]:
    """Return the C++ lines of one loop over the columns of a row, which is the array `source`.

    `body` are the lines for each element `float v`. If `vectorised` is true, the loop has an OpenMP pragma
    with the reduction clause `clause`, which may be empty.
    """
    pragma = [f"    #pragma omp simd{f' reduction({clause})' if clause else ''}"] if vectorised else []
    return [
        *pragma,
        f"    {COLUMN_LOOP}",
        f"      float v = {source}[i];",
        *(f"      {line}" for line in body),
        "    }",
    ]


def sweep_lines(sweep: Reduction, source: str, body: list[str], vectorised: bool) -> list[str]:
    """Return the C++ lines of one sweep over the row in the array `source`, with the lines `body`."""
    return [
        *(f"    {line}" for line in sweep.declare),
        *loop(sweep.clause, source, body, vectorised),
        *(f"    {line}" for line in sweep.finish),
    ]


def fused_rows(chain: OperatorChain, vectorised: bool) -> list[str]:
    """Return the C++ lines of fused loops for a chain with row operators."""
    row = fuse_row(chain, partial(sweep_lines, vectorised=vectorised))
    buffered = row.tail and row.source == "b"
    if row.tail:
        end = [*(f"    {line}" for line in row.tail), "    out[r] = v;"]
    else:
        end = loop("", row.source, [*row.pending, "b[i] = v;"], vectorised)
    return [
        *(["  std::vector<float> row(cols);"] if buffered else []),
        "  for (int64_t r = 0; r < rows; ++r) {",
        "    const float* a = x + r * cols;",
        *(["    float* b = row.data();"] if buffered else []),
        *([] if row.tail else ["    float* b = out + r * cols;"]),
        *(["    const float* s = y + r * cols;"] if "y" in chain.tensors else []),
        *row.lines,
        *end,
        "  }",
    ]


def separate_loops(chain: OperatorChain) -> list[str]:
    """Return the C++ lines of one loop for each operator, all of which change one copy of the input."""
    lines = ["  std::vector<float> a(x, x + t[0].numel);"]
    for step in chain.steps:
        line = replace_functions(elementwise(step), LIBM) if step.name not in ROW else ""
        if step.name in ROW:
            lines += row_operator_loops(step)
        elif "[i]" in line:
            line = line.replace("v = v", "a[i] = a[i]")
            if "y[i]" not in line:
                line = line.replace("[i];", "[i % cols];")
            lines.append(f"  for (int64_t i = 0; i < t[0].numel; ++i) {line}")
        else:
            lines.append(f"  for (float& v : a) {line}")
    return [*lines, "  std::copy(a.begin(), a.end(), out);"]


def row_operator_loops(step: Step) -> list[str]:
    """Return the C++ lines that apply one row operator to the copy of the input in place.

    A reduction stores one value for each row and shrinks the copy to these values.
    """
    operator = ROW[step.name]
    lines = ["  for (int64_t r = 0; r < rows; ++r) {", "    float* b = &a[r * cols];"]
    for sweep in operator.sweeps:
        lines += sweep_lines(sweep, "b", list(sweep.each), vectorised=False)
    if operator.result:
        lines += [f"    a[r] = {operator.result};", "  }", "  a.resize(rows);"]
    else:
        lines += [*loop("", "b", [operator.apply, "b[i] = v;"], vectorised=False), "  }"]
    return [replace_functions(line, LIBM) for line in lines]


def write_kernel(chain: OperatorChain, style: str) -> str:
    """Return the text of kernels/forward.cpp for the chain in the style `passes`, `fused` or `simd`."""
    match style:
        case "passes":
            body, header = separate_loops(chain), "#include <cmath>"
        case "fused":
            body, header = (fused_rows if chain.by_row else fused_elements)(chain, False), "#include <cmath>"
            body = [replace_functions(line, LIBM) for line in body]
        case "simd":
            body, header = (fused_rows if chain.by_row else fused_elements)(chain, True), '#include "vec.h"'
        case _:
            raise ValueError(f"unknown style {style}")
    return "\n".join(
        ['#include "binding_registry.h"', header, "KERNEL(forward) {", *arguments(chain), *body, "}", ""]
    )
