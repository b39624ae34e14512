"""Definitions of FlashInfer-Bench and SOL-ExecBench, which are converted to task files.

A definition is a JSON file with the named axes, inputs and outputs of a kernel, and the source of a function
`run` in PyTorch. A file of JSON lines has its workloads, which give the sizes of the variable axes and the
values of scalar inputs. The formats are described in docs/definition.md and docs/workload.md of
github.com/NVIDIA/SOL-ExecBench and in docs/flashinfer-trace of github.com/flashinfer-ai/flashinfer-bench. No
code of a definition is executed here.
"""

import ast
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from components.core.errors import UserError
from components.core.files import atomic_write
from components.core.records import reason
from components.core.task import check_contract
from components.core.workloads import MAX_WORKLOADS, WORKLOADS, parse_task

# Expression that draws a random input, by dtype; the ranges are those of FlashInfer-Bench.
NORMAL = "torch.randn({shape}, dtype=torch.{dtype})"
INTEGERS = "torch.randint(-1024, 1024, {shape}, dtype=torch.{dtype})"
RANDOM = {
    **dict.fromkeys(("float64", "float32", "float16", "bfloat16"), NORMAL),
    **dict.fromkeys(("int64", "int32", "int16"), INTEGERS),
    "int8": "torch.randint(-128, 128, {shape}, dtype=torch.{dtype})",
    "bool": "torch.randint(0, 2, {shape}, dtype=torch.{dtype})",
}
# Source of a task, after the definition's own.
TASK = """

import torch
import torch.nn as nn


class Model(nn.Module):
    {description!r}

    def forward(self, {inputs}):
        return {result}


{workloads} = {calls}


def get_inputs({arguments}):
{axes}    return {drawn}


def get_init_inputs():
    return []
"""
Record = TypeVar("Record", bound=BaseModel)


class Axis(BaseModel):
    """A named axis: `const` has a value, `expr` an expression of other axes, `var` a value by workload."""

    type: Literal["const", "var", "expr"]
    value: int | None = None
    expression: str | None = None


class Tensor(BaseModel):
    """The axes and the dtype of an input or output; a `shape` of None means a Python number."""

    shape: list[str] | None
    dtype: str


class Definition(BaseModel):
    """A kernel: its axes, inputs and outputs by name, and the source with its function `run`."""

    name: str
    description: str | None = None
    axes: dict[str, Axis]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    reference: str
    custom_inputs_entrypoint: str | None = None


class Input(BaseModel):
    """Where an input of a workload comes from; `value` is that of a scalar."""

    type: Literal["random", "scalar", "safetensors", "custom"]
    value: bool | int | float | None = None


class Workload(BaseModel):
    """One size of a definition: the variable axes and the origin of the inputs, by name."""

    axes: dict[str, int]
    inputs: dict[str, Input]


class Unfit(Exception):
    """Exception for a definition that no kernel task can be made of; its text says why."""


@dataclass(frozen=True)
class Converted:
    """The task files that were written, and by path of a definition below the folder why there is none."""

    files: list[Path]
    left_out: dict[str, str]


def convert(root: Path, out: Path) -> Converted:
    """Write a task file to the folder `out` for each definition below the folder `root` that fits a task.

    A task has at most MAX_WORKLOADS workloads, which are spread over the definition's workloads in the order
    of their sizes. A definition is left out if a tensor has a dtype of 8 bits or less other than int8 and
    bool, if an output is a number, if every workload reads inputs from a file, or if a file is missing or not
    in the format. Raises UserError, and writes nothing, if no definition is found or none fits, or if two
    that fit have one name.
    """
    left_out: dict[str, str] = {}
    sources: dict[Path, tuple[Path, str]] = {}
    for path, workloads in _pairs(root):
        try:
            definition = _parsed(Definition, path, path.read_text())
            code = task_source(definition, _workloads(workloads))
            check_contract(code, str(path))
        except (Unfit, UserError, OSError, UnicodeDecodeError) as error:
            left_out[str(path.relative_to(root))] = str(error)
            continue
        file = out / f"{definition.name}.py"
        if file in sources:
            raise UserError(
                f"{path}: has the name {definition.name}, and so has {sources[file][0]}; rename one of them."
            )
        sources[file] = path, code
    if not sources:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())[:500]
        raise UserError(
            f"{root}: no definition that a kernel task can be made of ({reasons or 'there is none'}); give a "
            "folder with definitions/ and workloads/, or with definition.json and workload.jsonl."
        )
    for file, (_, code) in sources.items():
        atomic_write(file, code)
    return Converted([*sources], left_out)


def task_source(definition: Definition, workloads: list[Workload]) -> str:
    """Return the source of the task of a definition with those of its workloads that need no file.

    Raises Unfit if the definition does not fit a task, and UserError if its source is not valid Python.
    """
    tensors = [*definition.inputs.values(), *definition.outputs.values()]
    if bad := [name for name in (*definition.axes, *definition.inputs) if not name.isidentifier()]:
        raise Unfit(f"{bad[0]!r} is no name in Python")
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", definition.name):
        raise Unfit(f"{definition.name!r} is no name of a file")
    if missing := sorted({tensor.dtype for tensor in tensors} - RANDOM.keys()):
        raise Unfit(f"dtype {missing[0]}")
    if any(tensor.shape is None for tensor in definition.outputs.values()):
        raise Unfit("an output is a number")
    arguments = [name for name, axis in definition.axes.items() if axis.type == "var"]
    if not definition.custom_inputs_entrypoint:
        arguments += [name for name, tensor in definition.inputs.items() if tensor.shape is None]
    calls = _calls(workloads, arguments)
    reference, entry = _renamed(definition)
    result = f"run({', '.join(definition.inputs)})"
    if _returns_dictionary(definition):
        result = f"[*map({result}.__getitem__, {list(definition.outputs)})]"
    axes = [
        f"    {name} = {axis.value if axis.type == 'const' else f'int({axis.expression})'}\n"
        for name, axis in sorted(definition.axes.items(), key=lambda item: item[1].type == "expr")
        if axis.type != "var"
    ]
    if entry:
        given = ", ".join(f"{name!r}: {name}" for name in definition.axes)
        drawn = f"[*map({entry}({{{given}}}, torch.device('cpu')).__getitem__, {list(definition.inputs)})]"
    else:
        drawn = f"[{', '.join(_drawn(name, tensor) for name, tensor in definition.inputs.items())}]"
    return reference.strip() + TASK.format(
        description=definition.description or definition.name,
        inputs=", ".join(definition.inputs),
        result=result,
        workloads=WORKLOADS,
        calls=calls,
        arguments=", ".join(arguments),
        axes="".join(axes),
        drawn=drawn,
    )


def _drawn(name: str, tensor: Tensor) -> str:
    """Return the expression of an input: a random tensor, or the argument with the name of a scalar."""
    shape = f"[{', '.join(tensor.shape or ())}]"
    return name if tensor.shape is None else RANDOM[tensor.dtype].format(shape=shape, dtype=tensor.dtype)


def _calls(workloads: list[Workload], arguments: list[str]) -> list[tuple[Any, ...]]:
    """Return the values of `arguments` of at most MAX_WORKLOADS workloads, from the smallest to the largest.

    Workloads whose inputs lie in files, or whose scalars are random, are left out. Raises Unfit if no
    workload is left.
    """
    found = []
    for workload in workloads:
        given = {name: value.value for name, value in workload.inputs.items()} | workload.axes
        call = tuple(given.get(name) for name in arguments)
        if "safetensors" not in {value.type for value in workload.inputs.values()} and None not in call:
            found.append(call)
    if not found:
        raise Unfit(f"none of its {len(workloads)} workloads can be made without a file")
    # Equal workloads count once.
    found = sorted(dict.fromkeys(found), key=lambda call: math.prod(v for v in call if isinstance(v, int)))
    count = min(MAX_WORKLOADS, len(found))
    return [found[round(index * (len(found) - 1) / max(1, count - 1))] for index in range(count)]


def _renamed(definition: Definition) -> tuple[str, str]:
    """Return the source, in which nothing has the name of a task's part, and the name of its entrypoint.

    The entrypoint is the function that makes the inputs, and its name is "" if there is none.
    """
    code, entry = definition.reference, definition.custom_inputs_entrypoint or ""
    tree = parse_task(code, definition.name)
    # A definition's source may use the names of a task's own parts for something else.
    clashes = {name: f"reference_{name}" for name in ("Model", "get_inputs", "get_init_inputs", WORKLOADS)}
    for node in ast.walk(tree):
        key = "id" if isinstance(node, ast.Name) else "name"
        if isinstance(node, ast.Name | ast.FunctionDef | ast.ClassDef) and getattr(node, key) in clashes:
            setattr(node, key, clashes[getattr(node, key)])
            code = ""
    return code or ast.unparse(tree), clashes.get(entry, entry)


def _returns_dictionary(definition: Definition) -> bool:
    """Return whether `run` returns its outputs by name; raise Unfit if the source has no such function."""
    tree = parse_task(definition.reference, definition.name)
    run = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if not run:
        raise Unfit("its source has no function run")
    returned = [node.value for node in ast.walk(run[-1]) if isinstance(node, ast.Return)]
    return any(isinstance(value, ast.Dict) for value in returned)


def _pairs(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of each definition below `root`: the definition, and its workloads."""
    for path in sorted(root.rglob("definition.json")):
        yield path, path.with_name("workload.jsonl")
    folder = root / "definitions"
    for path in sorted(folder.rglob("*.json")):
        yield path, root / "workloads" / path.relative_to(folder).with_suffix(".jsonl")


def _workloads(path: Path) -> list[Workload]:
    """Return the workloads in a file of JSON lines, each a workload or a trace that contains one."""
    if not path.is_file():
        raise Unfit(f"{path} is missing")
    # Not `splitlines`: a text in JSON may have separators, such as U+2028, at which that ends a line.
    lines = [line for line in path.read_text().split("\n") if line.strip()]
    return [_parsed(Workload, f"{path}:{number}", line) for number, line in enumerate(lines, 1)]


def _parsed(kind: type[Record], origin: Path | str, text: str) -> Record:
    """Return the record of the class `kind` in the JSON text; raise UserError, with `origin`, on a fault."""
    try:
        record = json.loads(text)
        return kind.model_validate(record.get("workload", record) if isinstance(record, dict) else record)
    except ValidationError as error:
        raise UserError(f"{origin}: {reason(error)}; mend this field.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not valid JSON ({error}); mend the file.") from error
