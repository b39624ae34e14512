"""Kernels in C++ in three styles: one loop an operator, one fused loop, and fused loops that vectorise."""

from __future__ import annotations

from components.bootstrap.chain_parser import REDUCTIONS, Chain, Step
from components.bootstrap.kernel_templates_cpp import LIBM, ROW, elementwise, plain

COLUMN_LOOP = "for (int64_t i = 0; i < cols; ++i) {"


def arguments(chain: Chain) -> list[str]:
    """Declarations of the tensors, by the names that the operators' lines use."""
    lines = [
        f"  {'' if name == 'out' else 'const '}float* {name} = f32(t[{index}]);"
        for index, name in enumerate(chain.tensors)
    ]
    if chain.by_row:
        lines.append("  const int64_t rows = t[0].size[0], cols = t[0].size[1];")
    return lines


def flat(chain: Chain, vectorised: bool) -> list[str]:
    """Elementwise chains: one loop over all elements."""
    pragma = ["  #pragma omp simd"] if vectorised else []
    body = [f"    {elementwise(step)}" for step in chain.steps]
    return [
        *pragma,
        "  for (int64_t i = 0; i < t[0].numel; ++i) {",
        "    float v = x[i];",
        *body,
        "    out[i] = v;",
        "  }",
    ]


def loop(clause: str, source: str, body: list[str], vectorised: bool) -> list[str]:
    """One sweep over the columns of a row."""
    pragma = [f"    #pragma omp simd{f' reduction({clause})' if clause else ''}"] if vectorised else []
    return [
        *pragma,
        f"    {COLUMN_LOOP}",
        f"      float v = {source}[i];",
        *(f"      {line}" for line in body),
        "    }",
    ]


def by_row(chain: Chain, vectorised: bool) -> list[str]:
    """Chains with row operators: as few sweeps over the row as the operators allow, elementwise lines riding along."""
    per_column = {"y": "y + r * cols"} if "y" in chain.tensors else {}
    lines, pending, source, touched = [], [], "a", False
    tail: list[str] = []
    for step in chain.steps:
        if tail:
            tail.append(elementwise(step))
        elif step.name not in ROW:
            pending.append(elementwise(step))
        else:
            operator = ROW[step.name]
            for sweep in operator.sweeps:
                rewrites = "b[i] = v;" in sweep.each
                # The row is stored once it differs from what is in memory, unless nobody reads it again.
                last = step.name in REDUCTIONS and sweep is operator.sweeps[-1]
                store = ["b[i] = v;"] if pending and not rewrites and not last else []
                lines += [f"    {line}" for line in sweep.declare]
                lines += loop(sweep.clause, source, [*pending, *store, *sweep.each], vectorised)
                lines += [f"    {line}" for line in sweep.finish]
                if store or rewrites:
                    source, touched = "b", True
                pending = []
            if step.name in REDUCTIONS:
                tail = [f"float v = {operator.result};"]
            else:
                pending = [operator.apply]
    if tail:
        lines += [*(f"    {line}" for line in tail), "    out[r] = v;"]
    else:
        lines += loop("", source, [*pending, "b[i] = v;"], vectorised)
    head = ["    const float* a = x + r * cols;"]
    if touched and tail:
        head.append("    float* b = row.data();")
    elif not tail:
        head.append("    float* b = out + r * cols;")
    buffer = ["  std::vector<float> row(cols);"] if touched and tail else []
    head += [f"    const float* s = {value};" for value in per_column.values()]
    lines = [line.replace("y[i]", "s[i]") for line in lines]
    return [*buffer, "  for (int64_t r = 0; r < rows; ++r) {", *head, *lines, "  }"]


def passes(chain: Chain) -> list[str]:
    """One operator at a time over a copy of the input."""
    lines = ["  std::vector<float> a(x, x + t[0].numel);"]
    for step in chain.steps:
        line = plain(elementwise(step), LIBM) if step.name not in ROW else ""
        if step.name in ROW:
            lines += row_pass(step)
        elif "[i]" in line:
            line = (
                line.replace("v = v", "a[i] = a[i]").replace("[i];", "[i % cols];")
                if "y[i]" not in line
                else line.replace("v = v", "a[i] = a[i]")
            )
            lines.append(f"  for (int64_t i = 0; i < t[0].numel; ++i) {line}")
        else:
            lines.append(f"  for (float& v : a) {line}")
    return [*lines, "  std::copy(a.begin(), a.end(), out);"]


def row_pass(step: Step) -> list[str]:
    """One row operator over the copy, in place; a reduction leaves its value at the row's number and shortens the copy."""
    operator = ROW[step.name]
    lines = ["  for (int64_t r = 0; r < rows; ++r) {", "    float* b = &a[r * cols];"]
    for sweep in operator.sweeps:
        lines += [f"    {line}" for line in sweep.declare]
        lines += loop("", "b", list(sweep.each), vectorised=False)
        lines += [f"    {line}" for line in sweep.finish]
    if operator.result:
        return [
            plain(line, LIBM)
            for line in [*lines, f"    a[r] = {operator.result};", "  }", "  a.resize(rows);"]
        ]
    return [
        plain(line, LIBM)
        for line in [*lines, *loop("", "b", [operator.apply, "b[i] = v;"], vectorised=False), "  }"]
    ]


def write(chain: Chain, style: str) -> str:
    """The text of kernels/forward.cpp."""
    match style:
        case "passes":
            body, header = passes(chain), "#include <cmath>"
        case "fused":
            body, header = (by_row if chain.by_row else flat)(chain, False), "#include <cmath>"
            body = [plain(line, LIBM) for line in body]
        case "simd":
            body, header = (by_row if chain.by_row else flat)(chain, True), '#include "vec.h"'
        case _:
            raise ValueError(f"unknown style {style}")
    return "\n".join(
        ['#include "binding_registry.h"', header, "KERNEL(forward) {", *arguments(chain), *body, "}", ""]
    )
