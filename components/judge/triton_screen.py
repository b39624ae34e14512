"""Screening of what a candidate's file does with Triton, before any of its code runs.

A candidate is an implementation of a task's module, to be judged. Triton compiles the bodies of kernels, but
calls Python functions that they name while it compiles, in a process in which torch computes and files can be
written. A file in Triton's cache is loaded into the timed process as native code
(components/sandbox/inside/triton_cache.py). So a body may name only functions of triton.language and local
variables, and the rest of a file may use modules only as `screen.screen_python` allows.
"""

import ast
import re
from collections import deque
from collections.abc import Collection
from typing import TypeGuard

IMPORTS = frozenset(
    """triton triton.language triton.language.math triton.language.extra triton.language.extra.libdevice
    triton.language.extra.cuda triton.language.extra.cuda.libdevice""".split()
)
# Names under which a file may use modules in a kernel, if only imports bind them.
MODULES = frozenset("triton tl libdevice math".split())
# Decorators of a kernel, and further names of Triton that may be used outside a kernel.
DECORATORS = frozenset(["triton.jit", "triton.autotune", "triton.heuristics"])
CALLS = DECORATORS | {"triton.Config", "triton.cdiv", "triton.next_power_of_2", "tl.constexpr"}
DTYPE = re.compile(r"tl\.(?:dtype|b?float\d+|u?int\d+)")
# Names of modules that may be used in a kernel; the submodules lead to other modules, such as os.
SUBMODULES = "core|standard|random|semantic|target_info|extra|math"
BODY_NAMES = re.compile(
    rf"(?:tl\.(?:math\.|extra\.(?:cuda\.)?libdevice\.)?|libdevice\.)(?!(?:{SUBMODULES}|libdevice|cuda)$)[a-zA-Z]\w*"
    r"|triton\.(?:cdiv|next_power_of_2)|math\.\w+"
)
# Attributes of a kernel that are its Python function, which could compute with torch.
KERNEL_FUNCTIONS = frozenset(["fn", "base_fn"])


def dotted_name(node: ast.expr) -> str:
    """Return an expression's dotted name, such as `torch.nn.Linear`.

    A root that is not a name is replaced by `?`: the result for `f(x).view` is `?.view`.
    """
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported_modules(tree: ast.AST) -> list[str]:
    """Return the names of what a file imports, such as `torch`, `triton.language` and `math.sqrt`.

    What is imported from a module has the module's name before its own, and the module is named too.
    """
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{name.name}" for name in node.names)]
    return names


def uses_triton(tree: ast.AST) -> bool:
    """Return whether a file imports Triton; `tree` is the file's syntax tree."""
    return any(name.partition(".")[0] == "triton" for name in imported_modules(tree))


def is_kernel(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Return whether a node is a function with `@triton.jit`, and no other decorators than Triton's.

    Triton compiles such a function, and raises an error if it is called in Python.
    """
    if not isinstance(node, ast.FunctionDef):
        return False
    names = [dotted_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return "triton.jit" in names and DECORATORS.issuperset(names)


def body_reason(
    kernel: ast.FunctionDef, modules: Collection[str], kernels: Collection[str], forbidden: Collection[str]
) -> str | None:
    """Return the reason why the body of a kernel is refused, such as `kernel:torch.save`, or None.

    `modules` are the names of MODULES that only imports bind in the file, `kernels` the names of its kernels,
    which a body may call, and `forbidden` the names that no body may use, such as those of other modules.
    """
    left = deque[ast.AST](kernel.body)
    while left:
        node = left.popleft()
        match node:
            case ast.Import() | ast.ImportFrom():
                return "kernel:import"
            case ast.Attribute():
                name = dotted_name(node)
                root = name.partition(".")[0]
                if root in modules and BODY_NAMES.fullmatch(name):
                    continue
                is_hidden = node.attr.startswith("__") or node.attr in KERNEL_FUNCTIONS
                if is_hidden or root in modules or root in kernels or root in forbidden:
                    return f"kernel:{name}"
            case ast.Name(id=name) if name in modules or name in forbidden:
                return f"kernel:{name}"
        left.extend(ast.iter_child_nodes(node))
    return None
