"""Search of a Python file's syntax tree for the extensions that it requests from torch.utils.cpp_extension.

The arguments of `load_inline` are evaluated without running the file, because nearly all published files pass
constants. An argument may consist of constants, names that are assigned once, lists, dictionaries, sums,
f-strings, `strip` and plain `format`.
"""

import ast
import string
from collections.abc import Sequence
from typing import Any

from components.sandbox.inside.inline_extension import (
    FUNCTIONS,
    INLINE_PARAMETERS,
    Extension,
    inline_extension,
)

# Arguments of load_inline that do not change the extension.
IGNORED = frozenset(
    """sycl_sources extra_sycl_cflags extra_include_paths build_directory verbose with_cuda with_sycl
    is_python_module keep_intermediates use_pch""".split()
)
# Largest number of expressions that are evaluated in one file, and of characters of one value and of all.
MAX_STEPS = 100_000
MAX_CHARACTERS, MAX_ALL_CHARACTERS = 1 << 20, 1 << 24
MODULE = "torch.utils.cpp_extension"


class NotConstant(Exception):
    """Error raised for an expression whose value does not follow from the source text."""


def uses_extensions(tree: ast.AST) -> bool:
    """Return whether a file imports torch.utils.cpp_extension."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.module == MODULE
            or (node.module == "torch.utils" and any(n.name == "cpp_extension" for n in node.names))
        ):
            return True
        if isinstance(node, ast.Import) and any(name.name == MODULE for name in node.names):
            return True
    return False


def called_function(call: ast.Call) -> str:
    """Return the name of the called function if it is `load_inline` or `load`, and otherwise ""."""
    name = ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""
    head, _, last = name.rpartition(".")
    return last if last in FUNCTIONS and head in ("", "cpp_extension", MODULE) else ""


def extensions_in(tree: ast.AST) -> list[Extension] | None:
    """Return the extensions that the calls of `load_inline` in a file request, or None if they are unknown.

    They are unknown if there is no such call, if an argument is not constant, or if the file calls `load`. A
    file may write the source files that it passes to `load` when it runs.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_function(node)]
    if not calls or any(called_function(call) == "load" for call in calls):
        return None
    try:
        constants = _Constants(_assigned_once(tree))
        return [_extension(call, constants) for call in calls]
    except (NotConstant, TypeError, ValueError, KeyError, IndexError, RecursionError):
        return None


def _assigned_once(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the assigned expression of each name that is assigned in only one place of the file, by name."""
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.arg):
            values.setdefault(node.arg, []).append(None)
    stores = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return {
        name: found[0]
        for name, found in values.items()
        if len(found) == 1 and found[0] is not None and stores.count(name) == 1
    }


def _extension(call: ast.Call, constants: "_Constants") -> Extension:
    given = dict(zip(INLINE_PARAMETERS, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            raise NotConstant
        given[keyword.arg] = keyword.value
    return inline_extension(
        **{name: constants.value(node) for name, node in given.items() if name not in IGNORED}
    )


class _Constants:
    """Evaluator of the constant expressions in one file.

    `names` maps each name that may occur in an expression to the expression that is assigned to it.
    NotConstant is raised for an expression that is not constant. Because the source is untrusted, it is also
    raised if the evaluation takes too many steps (`MAX_STEPS`), or if the values have too many characters.
    """

    def __init__(self, names: dict[str, ast.expr]):
        self.names = names
        self.steps = self.characters = 0

    def value(self, node: ast.expr) -> Any:
        self.steps += 1
        value = self._value(node)
        self.characters += len(value) if isinstance(value, str) else 0
        if self.steps > MAX_STEPS or self.characters > MAX_ALL_CHARACTERS:
            raise NotConstant
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.value(self.names[name])
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self.value(key): self.value(value) for key, value in pairs if key is not None}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._sum([self.value(left), self.value(right)])
            case ast.JoinedStr(values=parts):
                return self._sum([str(self.value(part)) for part in parts])
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.value(value)
            case ast.Call(func=ast.Attribute(value=base, attr="strip"), args=[], keywords=[]):
                return str(self.value(base)).strip()
            case ast.Call(func=ast.Attribute(value=base, attr="format"), args=args, keywords=keywords):
                named = {str(keyword.arg): str(self.value(keyword.value)) for keyword in keywords}
                return self._formatted(str(self.value(base)), [str(self.value(a)) for a in args], named)
        raise NotConstant

    @staticmethod
    def _sum(parts: Sequence[Any]) -> Any:
        if all(isinstance(part, str) for part in parts) and sum(map(len, parts)) <= MAX_CHARACTERS:
            return "".join(parts)
        raise NotConstant

    def _formatted(self, template: str, positional: list[str], named: dict[str, str]) -> Any:
        """Return `template` with its plain fields replaced, such as `{}`, `{0}` and `{name}`."""
        parts, automatic = [], iter(positional)
        for literal, field, specification, conversion in string.Formatter().parse(template):
            parts.append(literal)
            if field is None:
                continue
            if specification or conversion:
                raise NotConstant
            if field.isdecimal():
                parts.append(positional[int(field)])
            else:
                parts.append(named[field] if field else next(automatic, ""))
        return self._sum(parts)


def without_unused_parts(tree: ast.Module) -> ast.Module:
    """Return a file's syntax tree without the parts that a candidate does not need.

    These parts are `get_inputs`, `get_init_inputs`, the main block, the class `Model` if nothing else uses
    it, and `import` statements of names that are not used. Published files often have them, and the screening
    would refuse them although the judge does not run them.
    """
    body = [
        node
        for node in tree.body
        if not (
            (isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"))
            or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
        )
    ]
    others = [node for node in body if not (isinstance(node, ast.ClassDef) and node.name == "Model")]
    used = {node.id for part in others for node in ast.walk(part) if isinstance(node, ast.Name)}
    if "Model" not in used:
        body = others
    kept = [
        node
        for node in body
        if not isinstance(node, ast.Import)
        or any((name.asname or name.name.partition(".")[0]) in used for name in node.names)
    ]
    return ast.Module(kept, [])
