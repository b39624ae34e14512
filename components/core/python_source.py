"""Parsing of Python sources in programs with several threads."""

import ast
import contextlib

# Largest number of times that one source is parsed, if parsing fails because of other threads.
ATTEMPTS = 8


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
