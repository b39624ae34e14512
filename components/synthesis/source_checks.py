"""Checks of a task's source that do not execute it.

They find forbidden imports and calls, and wrong operators in the task's labels. A source that passes the
checks is still untrusted, so only the sandbox executes it.
"""

import ast
import re
from collections.abc import Sequence

from components.core.python_source import parse_python
from components.synthesis.core_operators import BY_NAME, canonical

# Modules that a task may import, including their submodules.
ALLOWED_MODULES = frozenset(
    (
        "torch math typing types collections functools itertools dataclasses enum abc numbers operator "
        "copy warnings numpy einops"
    ).split()
)
FORBIDDEN_NAMES = frozenset("eval exec compile open __import__ globals breakpoint".split())
FORBIDDEN_ATTRIBUTES = frozenset(
    (
        "__globals__ __builtins__ __subclasses__ __code__ __class__ __bases__ __mro__ __dict__ __loader__ "
        "__reduce__ __getattribute__"
    ).split()
)
FORBIDDEN_TORCH = re.compile(
    r"torch\.(load|save|hub|compile|ops|classes|_C|multiprocessing|distributed"
    r"|utils\.cpp_extension|cuda\.(synchronize|Event|Stream))\b"
)


def find_forbidden(code: str) -> str:
    """Return a description of the first forbidden import, name or attribute, or an empty string.

    `code` must be valid Python.
    """
    for node in ast.walk(parse_python(code)):
        match node:
            case ast.Import(names=names):
                foreign = [
                    alias.name for alias in names if alias.name.partition(".")[0] not in ALLOWED_MODULES
                ]
                if foreign:
                    return f"imports {foreign[0]}"
            case ast.ImportFrom(module=module, level=level) if (
                level or (module or "").partition(".")[0] not in ALLOWED_MODULES
            ):
                return f"imports {module}"
            case ast.Name(id=name) if name in FORBIDDEN_NAMES:
                return f"uses {name}"
            case ast.Attribute(attr=name) if name in FORBIDDEN_ATTRIBUTES:
                return f"uses {name}"
            case ast.Attribute() if FORBIDDEN_TORCH.match(ast.unparse(node)):
                return f"uses {ast.unparse(node)}"
    return ""


def find_label_error(ops: Sequence[str], data_source: str, code: str) -> str:
    """Return a description of the first wrong label of a task, or an empty string.

    A label is wrong if `ops` names an operator that is not in the source, if `data_source` is torch#N and the
    number of operators is not N, or if it is torch#N or transformers and `ops` is empty.
    """
    number = re.fullmatch(r"torch#(\d+)", data_source)
    if not ops and (number or data_source == "transformers"):
        return "ops is empty"
    if number and int(number[1]) != len(ops):
        return f"{data_source} has {len(ops)} operators"
    used = {
        canonical(f".{node.id if isinstance(node, ast.Name) else node.attr}")
        for node in ast.walk(parse_python(code))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    text = "".join(code.split())
    for name in ops:
        if name in BY_NAME:
            line = re.escape("".join(BY_NAME[name].line.split()))
            if re.search(re.sub(r"\\\{\d\\\}", r"[-\\d.e]+", line), text):
                continue
        if canonical(f".{name}") not in used:
            return f"{name} is not in the source"
    return ""
