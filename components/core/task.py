"""The kernel task: a self-contained PyTorch module that a policy has to make faster.

A task has the form of KernelBench (`Model`, `get_inputs`, `get_init_inputs`) and of the public data set
CUDA-Agent-Ops-6K, whose columns `ops`, `data_source` and `code` are kept. It may also name workloads, several
calls of `get_inputs` (`workloads.py`). The source of a task is untrusted: this module only parses it, and
only a runner, which is a sandboxed process, executes it.
"""

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
from pydantic import Field

from components.core.errors import UserError, refuse
from components.core.files import atomic_write, digest_bytes, digest_json
from components.core.records import FrozenModel, TaskDtype, reason
from components.core.text import parse_python, parse_without_docstrings
from components.core.workloads import parse_task, workloads_of

# Method of a tensor and of a module that casts its floating-point values, by dtype.
CASTS: dict[TaskDtype, str] = {"float16": "half", "bfloat16": "bfloat16"}
# End of a source whose constructor of Model has no last line after which the module can be cast.
WRAPPED_INIT = """


def _cast(init):
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.{cast}()

    return __init__


Model.__init__ = _cast(Model.__init__)
"""
KERNELBENCH = "https://github.com/ScalingIntelligence/KernelBench"
REQUIRED_PARTS = ("Model", "get_inputs()", "get_init_inputs()")


def normalise(code: str) -> str:
    """Return the source of a task without comments and docstrings, formatted by `ast.unparse`.

    Sources whose results are equal are the same task. Raises what `ast.parse` raises for a faulty source.
    """
    return ast.unparse(parse_without_docstrings(code))


class KernelTask(FrozenModel):
    """A PyTorch module that a policy has to make faster, identified by the digest of its normalised source.

    `code` is its Python source, and `ops` are the names of its operators in their order. `split` says whether
    the task is for training (`train`) or for evaluation (`held_out`). `name` is that of the task's file or
    row, or "". `data_source` is its kind, such as torch#2 for a chain of two operators, or its origin.
    `level` is its level in an evaluation suite, or None if it has none. `evidence` is what was recorded when
    the judge checked and admitted the task, such as the shapes of its inputs and outputs and its eager time
    in seconds. It is empty if the judge has not checked the task.
    """

    code: str
    ops: tuple[str, ...] = ()
    data_source: str = "file"
    split: Literal["train", "held_out"] = "train"
    name: str = ""
    level: int | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)

    @cached_property
    def task_id(self) -> str:
        """Return the first 16 hexadecimal digits of the SHA-256 of the source that `normalise` returns.

        Comments, docstrings and formatting of the source do not change this id. Raises what `ast.parse`
        raises for a faulty source.
        """
        return digest_bytes(normalise(self.code).encode())[:16]

    @cached_property
    def code_digest(self) -> str:
        """Return the SHA-256 of the source with its comments, docstrings and formatting, in hexadecimal.

        `task_id` leaves these out, but the task's class `Model` may read them when it runs, for example its
        own docstring.
        """
        return digest_bytes(self.code.encode(errors="surrogatepass"))


def check_contract(code: str, origin: str) -> None:
    """Raise UserError, which names `origin`, unless the source is valid Python with the parts of a task.

    The parts are a class `Model` and the functions `get_inputs` and `get_init_inputs`. If the source names
    workloads (several calls of `get_inputs`), UserError is also raised unless these are valid
    (`workloads.workloads_of`). `origin` is the path of the source's file, or another text that tells the user
    where it is.
    """
    tree = parse_task(code, origin)
    parts = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    parts |= {f"{node.name}()" for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [part for part in REQUIRED_PARTS if part not in parts]
    refuse(
        (
            missing,
            f"{origin}: a task needs class Model(nn.Module), get_inputs() and get_init_inputs(); "
            f"add {', '.join(missing)}.",
        )
    )
    workloads_of(code, origin)


def cast_task(task: KernelTask, dtype: TaskDtype) -> KernelTask:
    """Return the task with the source that `in_dtype` casts to `dtype`, or the task itself for float32.

    `evidence` of the result is empty, because what the judge recorded when it checked the task holds only for
    the source before the cast. Raises UserError, which names the task, if its source is not valid Python or
    lacks a part of a kernel task (`check_contract`).
    """
    if dtype not in CASTS:
        return task
    origin = task.name or task.task_id
    check_contract(task.code, origin)
    code = in_dtype(task.code, dtype)
    check_contract(code, origin)
    return KernelTask.model_validate(task.model_dump() | {"code": code, "evidence": {}})


def in_dtype(code: str, dtype: TaskDtype) -> str:
    """Return the source of a task in which the module and the floating-point inputs are cast to `dtype`.

    `code` has the parts of a kernel task (`check_contract`). The module is cast by a line, such as
    `self.half()`, that is inserted after the last statement of the constructor of `Model`. If `Model` has no
    constructor of its own, or one with a return statement or with a last statement that does not begin its
    line, code at the end of the source replaces the constructor by one that calls it and then casts.
    `get_inputs` returns its list with every floating-point tensor cast; KernelBench's option `precision`
    casts integers too. For float32, `code` is returned unchanged.
    """
    return _cast_module(_cast_inputs(code, CASTS[dtype]), CASTS[dtype]) if dtype in CASTS else code


def _insert(code: str, texts: Sequence[tuple[int, int, str]]) -> str:
    """Return `code` with texts inserted, each given as (line, column, text).

    Line and column are counted as in the nodes of `ast`: lines from 1, and columns in bytes of UTF-8 from 0.
    They are positions in `code` before the insertion of any text.
    """
    lines = code.encode().splitlines(keepends=True)
    for number, column, text in sorted(texts, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:column] + text.encode() + line[column:]
    return b"".join(lines).decode()


def _returns(function: ast.FunctionDef) -> list[ast.Return]:
    """Return the return statements of a function, without those of functions and classes inside it."""
    found, left = list[ast.Return](), list[ast.AST](function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Return):
            found.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))
    return found


def _cast_inputs(code: str, cast: str) -> str:
    texts = []
    tree = parse_python(code)
    inputs = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "get_inputs"][-1]
    for node in _returns(inputs):
        if (value := node.value) is not None:
            left, right = ("", "") if isinstance(value, ast.List) else ("(", ")")
            condition = "if isinstance(t, torch.Tensor) and t.is_floating_point() else t"
            texts += [
                (value.lineno, value.col_offset, f"[t.{cast}() {condition} for t in {left}"),
                (value.end_lineno or 0, value.end_col_offset or 0, f"{right}]"),
            ]
    return _insert(code, texts)


def _cast_module(code: str, cast: str) -> str:
    model = [n for n in parse_python(code).body if isinstance(n, ast.ClassDef) and n.name == "Model"][-1]
    for init in model.body:
        if isinstance(init, ast.FunctionDef) and init.name == "__init__" and not _returns(init):
            last, end = init.body[-1], init.body[-1].end_lineno or 0
            lines = code.encode().splitlines()
            indent = lines[last.lineno - 1][: last.col_offset].decode()
            if not indent.strip():
                return _insert(code, [(end, len(lines[end - 1].rstrip()), f"\n{indent}self.{cast}()")])
    return code.rstrip() + WRAPPED_INIT.format(cast=cast)


def dtype_of(code: str) -> TaskDtype:
    """Return the dtype to which `in_dtype` has cast the source of a task, or float32 if there is no cast.

    The cast is recognised by its line, `self.half()` or `self.bfloat16()`. A source that was written with
    such a line counts as cast too.
    """
    found = re.search(rf"^[ \t]+self\.({'|'.join(CASTS.values())})\(\)[ \t]*$", code, re.MULTILINE)
    return next((dtype for dtype, cast in CASTS.items() if found and found[1] == cast), "float32")


def missing_kernelbench(path: Path) -> str:
    """Return a text that says how to get KernelBench if `path` names a missing checkout of it.

    KernelBench is a public suite of kernel tasks. The result is empty if the last part of `path` is not
    KernelBench, or if `path` exists.
    """
    if path.name != "KernelBench" or path.exists():
        return ""
    return (
        f"{path} is missing; get it with `git clone {KERNELBENCH} {path}`, or give the path of another "
        "checkout or of KernelBench's parquet file from Hugging Face"
    )


def load_task(path: Path) -> KernelTask:
    """Return the task in a Python file, with the file's name without its suffix as the name of the task.

    Raises UserError if the file cannot be read or is not a kernel task (`check_contract`).
    """
    try:
        code = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: the task file cannot be read ({error}); give a readable Python file."
        ) from error
    check_contract(code, str(path))
    return KernelTask(code=code, name=path.stem)


# Keys of a task's evidence whose values are measured and so differ each time the data set is built.
MEASURED = ("eager_seconds", "compile_seconds", "limit", "headroom", "spread")
# Columns of tasks.parquet.
COLUMNS = ("ops", "data_source", "code", "task_id", "split", "name", "evidence")


def write_tasks(path: Path, tasks: list[KernelTask]) -> None:
    """Write tasks to the parquet file `path`, with one row for each task.

    The file has the columns ops, data_source and code of the public data set CUDA-Agent-Ops-6K, and the
    columns task_id, split, name and evidence (as JSON). The field `level` of a task is not written. An
    existing file is replaced in one step.
    """
    rows = [
        task.model_dump(include={"data_source", "code", "split", "name"})
        | {
            "ops": list(task.ops),
            "task_id": task.task_id,
            "evidence": json.dumps(task.evidence, sort_keys=True),
        }
        for task in tasks
    ]
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        pyarrow.table({column: [row[column] for row in rows] for column in COLUMNS}), sink
    )
    atomic_write(path, sink.getvalue().to_pybytes())


def read_tasks(path: Path) -> list[KernelTask]:
    """Return the tasks in a parquet file of `write_tasks` or of the public data set CUDA-Agent-Ops-6K.

    Missing columns get default values. A column `level`, as KernelBench's files have, gives the levels.
    Sources are not checked (`check_contract`). Raises UserError if the file cannot be read, has no rows or no
    column `code`, or has a row with values of wrong types.
    """
    rows = read_rows(path, "code")
    refuse((not rows, f"{path}: holds no task; build it with cuda-agent data build."))
    return [_task(path, number, row) for number, row in enumerate(rows)]


def read_rows(path: Path, *columns: str, field: str = "") -> list[dict[str, Any]]:
    """Return the rows of a parquet file of tasks, each with its values by column.

    Raises UserError, which begins with `field`, if the file cannot be read or lacks one of `columns`.
    """
    try:
        table = pyarrow.parquet.read_table(path)
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{field}{path}: not a readable parquet file "
            f"({reason(error) if path.exists() else 'there is no such file'}); give one of tasks, such as "
            "cuda-agent data build writes."
        ) from error
    refuse(
        *(
            (
                name not in table.column_names,
                f"{field}{path}: column {name} is missing; a parquet file of tasks has the columns ops, "
                "data_source and code.",
            )
            for name in columns
        )
    )
    return rows


def parse_operators(value: Any) -> tuple[str, ...]:
    """Return the names of operators in a value of the column `ops` of a parquet file of tasks.

    The value is a list, a text with a list in JSON or Python syntax, a text of names with commas between
    them, or None, which gives no names. Any other value, such as a number, is taken for a name.
    """
    if isinstance(value, str):
        # A list of texts in JSON is also one in Python.
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value)
    if not isinstance(value, list | tuple | set):
        value = [] if value is None else str(value).split(",")
    return tuple(str(name).strip() for name in value if str(name).strip())


def _task(path: Path, number: int, row: dict[str, Any]) -> KernelTask:
    try:
        return KernelTask(
            code=row["code"],
            ops=parse_operators(row.get("ops")),
            data_source=row.get("data_source") or "parquet",
            split=row.get("split") or "train",
            name=row.get("name") or "",
            level=row.get("level"),
            evidence=json.loads(row.get("evidence") or "{}"),
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path}: row {number} is no task ({reason(error)}); build it with cuda-agent data build."
        ) from error


def dataset_version(path: Path) -> str:
    """Return the version of a data set: the SHA-256 of its rows in their order, without measured values.

    The version has 64 hexadecimal digits. `path` is the parquet file. Left out are those values of
    `KernelTask.evidence` that are measured, such as times, so two builds with the same tasks in the same
    order have the same version. Raises UserError as `read_tasks` does.
    """
    return digest_json(
        [
            [
                task.ops,
                task.data_source,
                task.code,
                task.split,
                task.name,
                {key: None if key in MEASURED else value for key, value in task.evidence.items()},
            ]
            for task in read_tasks(path)
        ]
    )
