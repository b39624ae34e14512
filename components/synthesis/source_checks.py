"""What can be said of a task's source without running it: does it keep to computing, and are its operators those it names?

Both looks are parses. A source that passes them is still untrusted: only the sandbox ever executes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from components.synthesis.core_operators import BY_NAME, canonical

MODULES = frozenset(
    "torch math typing types collections functools itertools dataclasses enum abc numbers operator copy warnings numpy einops".split()
)
"""What a task may import, with everything below it."""
CALLS = frozenset("eval exec compile open __import__ globals breakpoint".split())
REACH = frozenset(
    "__globals__ __builtins__ __subclasses__ __code__ __class__ __bases__ __mro__ __dict__ __loader__ __reduce__ __getattribute__".split()
)
UNSAFE = re.compile(
    r"torch\.(load|save|hub|compile|ops|classes|_C|multiprocessing|distributed|utils\.cpp_extension|cuda\.(synchronize|Event|Stream))\b"
)


def hostile(code: str) -> str:
    """The first thing in the source that no computation needs: a foreign import, a call that reaches the machine or the
    interpreter; empty when there is none. `code` must parse."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                foreign = [alias.name for alias in names if alias.name.partition(".")[0] not in MODULES]
                if foreign:
                    return f"imports {foreign[0]}"
            case ast.ImportFrom(module=module, level=level):
                if level or (module or "").partition(".")[0] not in MODULES:
                    return f"imports {module}"
            case ast.Name(id=name) if name in CALLS:
                return f"uses {name}"
            case ast.Attribute(attr=name) if name in REACH:
                return f"uses {name}"
            case ast.Attribute() if UNSAFE.match(ast.unparse(node)):
                return f"uses {ast.unparse(node)}"
    return ""


def mislabelled(ops: Sequence[str], data_source: str, code: str) -> str:
    """What is wrong with the row's labels: an operator that the source does not hold (as 9.3 % of the public rows have),
    or another number of operators than torch#N says; empty when they are right."""
    number = re.fullmatch(r"torch#(\d+)", data_source)
    if not ops and (number or data_source == "transformers"):
        return "ops is empty"
    if number and int(number[1]) != len(ops):
        return f"{data_source} has {len(ops)} operators"
    used = identifiers(code)
    text = "".join(code.split())
    for name in ops:
        seed = BY_NAME.get(name)
        if seed is not None:
            wanted = re.escape("".join(seed.line.split()))
            if re.search(re.sub(r"\\\{\d\\\}", r"[-\\d.e]+", wanted), text):
                continue
        if canonical(f".{name}") not in used:
            return f"{name} is not in the source"
    return ""


def identifiers(code: str) -> set[str]:
    """Names and attributes that the source uses outside of imports and string constants, in canonical form."""
    found = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return {canonical(f".{name}") for name in found}
