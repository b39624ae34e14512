"""Functions on text.

They parse sources of Python, remove control characters from the output of untrusted programs, and format the
figures of a run for people.
"""

import ast
import contextlib
import re
from collections.abc import Mapping
from typing import Any

# Largest number of times that one source is parsed, if parsing fails because of other threads.
ATTEMPTS = 8
ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def readable(text: str, limit: int) -> str:
    """Return `text` without terminal escapes and control characters except line feeds and tabs.

    If the result has more than `limit` characters, its middle is replaced by a note with the number of
    removed characters, so that about `limit` characters remain.
    """
    text = ESCAPE.sub("", text) if "\x1b" in text else text
    if not text.isprintable():
        text = "".join(c for c in text if c in "\n\t" or c.isprintable())
    if len(text) <= limit:
        return text
    half = max(0, limit - 40) // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[len(text) - half :]}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def figures_text(figures: Mapping[str, float]) -> str:
    """Return the figures with their names as text, such as "reward 1.2  m_3 25%".

    Figures whose names begin with pass_rate or m_ are shares and are written as percentages, all others with
    three significant digits. The figures m_-1 to m_3 are the shares of trajectories with the rewards -1 to 3
    (components/agent/rewards.py).
    """
    return "  ".join(
        f"{name} {value:.0%}" if name.startswith(("m_", "pass_rate")) else f"{name} {value:.3g}"
        for name, value in figures.items()
    )


def format_number(value: float | None, pattern: str = "{:.3g}") -> str:
    return "–" if value is None else pattern.format(value)


# Columns of the table of evaluations at the end of a run.
FIGURES = (
    "held-out tasks",
    "pass rate",
    "faster than eager",
    "faster than compile",
    "geomean eager",
    "geomean compile",
)


def figures_row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return the cells of the row for one evaluation in a table with the columns FIGURES.

    `name` is the first cell. The others are, as text, the pass rate, the shares of tasks faster than eager
    and than torch.compile, and the geometric means of the speed-ups over both; a missing figure is a dash.
    `found` has the fields of a components.evaluation.results.Summary.
    """
    rate, mean = found["faster_rate"], found["geomean"]
    cells = [format_number(cell, "{:.0%}") for cell in (found["pass_rate"], rate["eager"], rate["compile"])]
    return [name, *cells, format_number(mean["eager"], "{:.2f}x"), format_number(mean["compile"], "{:.2f}x")]


def before_name(record: Mapping[str, Any]) -> str:
    """Return how tables name the evaluation of a run's first policy, such as "before (cold start)".

    `record` is the content of the run's run.json. The text in brackets is "cold start" if the run began from
    scratch, and otherwise names the version of the registry (such as "version 3") or the folder or file that
    the run began from. It is left out if the record, as one of an earlier release, does not say.
    """
    start = record.get("night", {}).get("start", "")
    return f"before ({'cold start' if start == 'scratch' else start})" if start else "before"


def parse_python(code: str | bytes) -> ast.Module:
    """Return the syntax tree of a module.

    Raises what `ast.parse` raises for a faulty source: SyntaxError, ValueError, RecursionError, MemoryError.
    CPython 3.11 counts the depth of syntax trees for all threads together, so `ast.parse` raises SystemError
    if threads change while it works (https://github.com/python/cpython/issues/106905). The call is then
    repeated, up to ATTEMPTS times in all.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(code)
    return ast.parse(code)


def parse_without_docstrings(code: str | bytes) -> ast.Module:
    """Return the syntax tree of a module without the docstrings of the module and its classes and functions.

    A body that has nothing but a docstring becomes `pass`. Raises what `parse_python` raises.
    """
    tree = parse_python(code)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree
