"""Write the output folder of an optimisation, which contains these files and folders.

report.md          result of the optimisation, how it was measured, and how to use the kernel
result.json        the same figures for programs
model_new.py       ModelNew for the user's code, which loads the library in workspace/
workspace/         the workspace template with the candidate's files and its built library
trajectories/      all trajectories of the optimisation

The candidate is the chosen implementation of the user's module, and a trajectory is the record of one attempt
of the policy. If no faster kernel was found, model.py, which is the user's code, takes the place of
model_new.py and workspace/.
"""

import ast
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Template

from components.agent.optimize.search import Outcome
from components.agent.trajectory import save_trajectories
from components.agent.workspace import TEMPLATE
from components.core.files import atomic_folder, write_json
from components.core.params import Params
from components.core.text import parse_python
from components.judge.verdict import Seconds, Speedup
from components.sandbox.build import Builder

RESULT = "result.json"
# Names of everything in an output folder; Python makes the last when model_new.py is imported.
FILES = (RESULT, "report.md", "model_new.py", "model.py", "workspace", "trajectories", "__pycache__")
LOADER = '''\
import importlib.util as _util
import pathlib as _pathlib
import sys as _sys


def _load(folder):
    """The kernels as built for this machine.

    `bash utils/compile.sh` in workspace/ builds them for another.
    """
    spec = _util.spec_from_file_location("cuda_extension", folder / "cuda_extension.so")
    module = _util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_sys.modules["cuda_extension"] = _load(_pathlib.Path(__file__).resolve().parent / "workspace")
'''


def drop_in(model_new: str) -> str:
    """Return the text of model_new.py with `LOADER` inserted, which loads the library of the kernels.

    `LOADER` is inserted before the first statement other than constants, such as docstrings, and imports
    from `__future__`.
    """
    tree = parse_python(model_new)
    first = next(
        (
            node
            for node in tree.body
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ),
        None,
    )
    # Positions in the tree count bytes, in lines that do not end at a form feed, for example.
    lines = [*model_new.encode().splitlines(keepends=True), b""]
    index, column = len(lines) - 1, 0
    if first is not None:
        nodes = (node for node in ast.walk(first) if isinstance(node, ast.stmt | ast.expr))
        index, column = min(node.lineno for node in nodes) - 1, first.col_offset  # decorators come first
    before = b"".join(lines[:index]) + lines[index][:column]
    gap = b"\n" if before and not before.endswith((b"\n", b"\r")) else b""
    after = lines[index][column:] + b"".join(lines[index + 1 :])
    return (before + gap + LOADER.encode() + b"\n" + after).decode()


def write_workspace(folder: Path, code: str, files: dict[str, str], library: bytes | None) -> None:
    """Write a workspace with the task's source `code` and the candidate's `files` to the new folder `folder`.

    The candidate is an implementation of the task. `files` has its texts by workspace path. `library` is its
    built library, which is written to cuda_extension.so, or None if there is none.
    """
    shutil.copytree(
        TEMPLATE, folder, ignore=shutil.ignore_patterns("kernels", "model.py", "model_new.py", "__pycache__")
    )
    (folder / "kernels").mkdir()
    (folder / "model.py").write_text(code)
    for name, text in files.items():
        (folder / name).write_text(text)
    if library is not None:
        (folder / "cuda_extension.so").write_bytes(library)


def export(outcome: Outcome, params: Params, out: Path, builds: Path, policy: str) -> dict[str, Any]:
    """Write the output folder `out` of an optimisation atomically and return the contents of result.json.

    `outcome` is the result of the search for a kernel, `builds` is the folder of the judge's cache of built
    libraries, and `policy` is the name of the policy in the report.
    """
    verdict = outcome.verdict
    record = {
        "found": outcome.found,
        "speedup": (verdict.speedup if verdict is not None else Speedup()).model_dump(),
        "seconds_per_call": (verdict.seconds if verdict is not None else Seconds()).model_dump(),
        "milestone": verdict.milestone if verdict is not None else -1,
        "out": str(out.resolve()),
        "turns": outcome.turns,
        "seconds": round(outcome.seconds, 3),
        "attempts": len(outcome.trajectories),
        "candidates": dict(Counter(verdict.status for verdict in outcome.judged)),
        "policy": policy,
        "device": params.device,
        "precision": params.precision,
        "task_id": outcome.task.task_id,
        "notes": list(outcome.notes),
    }
    with atomic_folder(out) as temporary:
        if outcome.found:
            library = Builder(params.sandbox, params.device, builds).build(outcome.files).library
            write_workspace(temporary / "workspace", outcome.task.code, outcome.files, library)
            (temporary / "model_new.py").write_text(drop_in(outcome.files["model_new.py"]))
        else:
            (temporary / "model.py").write_text(outcome.task.code)
        (temporary / "report.md").write_text(report(outcome, params, policy))
        save_trajectories(temporary / "trajectories", list(outcome.trajectories))
        write_json(temporary / RESULT, record)
    return record


def headline(outcome: Outcome) -> str:
    """Return the result of the optimisation as one or two sentences for the user."""
    verdict = outcome.verdict
    if verdict is None:
        return (
            "No gain found: no kernel was right."
            if outcome.judged
            else "No gain found: the policy wrote no kernel."
        )
    if verdict.status != "correct":
        return (
            "No gain found: the best kernel failed when it was measured again "
            f"({verdict.status}: {verdict.reason})."
        )
    eager, compiled = verdict.speedup.eager, verdict.speedup.compile
    assert eager is not None
    if not outcome.found:
        return (
            f"No gain found: the fastest right kernel runs at {eager.estimate:.2f} times "
            "the speed of eager PyTorch."
        )
    text = f"Found: {eager.estimate:.2f} times as fast as eager PyTorch"
    if compiled is None:
        return f"{text}."
    text += f", {compiled.estimate:.2f} times as fast as torch.compile."
    if compiled.high < 1:
        return f"{text} torch.compile alone is the better choice here."
    return text if compiled.low > 1 else f"{text} Against torch.compile that may be noise."


def report(outcome: Outcome, params: Params, policy: str) -> str:
    """Return the text of report.md on the outcome of an optimisation; `policy` is the policy's name in it."""
    template: Template = Template(
        Path(__file__).with_name("report.md.j2").read_text(),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return template.render(
        outcome=outcome,
        verdict=outcome.verdict,
        headline=headline(outcome),
        counts=Counter((verdict.status, verdict.reason) for verdict in outcome.judged).most_common(),
        params=params,
        policy=policy,
    )
