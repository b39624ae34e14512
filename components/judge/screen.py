"""Screening of a candidate's files and of its source code, before any of its code runs.

A candidate is an implementation of a task's module that is judged, and the policy is the language model that
writes it. The rules for policies are in agent_workdir/SKILL.md. `screen_python` compares the syntax tree of
model_new.py with lists of allowed names; symbol_screen.py screens the built library. Calls of operators of
torch that compute are blocked later, while the candidate runs in its sandboxed process
(sandbox/inside/operator_modes.py). A candidate that evades the screening is still verified and timed like any
other candidate.
"""

import __future__

import ast
import math
import re
import typing
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from components.core.text import parse_python
from components.judge import triton_screen
from components.sandbox.inside.inline_extension import CONSTANTS, FUNCTIONS

FILE_NAME = re.compile(r"model_new\.py|kernels/[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
MAX_MODEL_CHARACTERS = 64 << 10
MAX_CANDIDATE_CHARACTERS = 4 << 20
EXTENSION_MODULE = "torch.utils.cpp_extension"
# First parts of the names of modules that may not be used as values, as they are imported.
PACKAGES = frozenset(["torch", "triton", "nn", "functional", "utils", "language", "libdevice"])
# Names that may be imported from modules, besides those in IMPORTS.
FREE_NAMES = {
    "typing": {*typing.__all__},
    "math": {*dir(math)},
    "__future__": {*__future__.all_feature_names},
}
# Condition of the block that runs only if the file is a program, as ast.unparse writes it.
MAIN = "__name__ == '__main__'"
IMPORTS = frozenset("torch torch.nn torch.nn.functional cuda_extension math typing __future__".split())
# Further imports that are allowed in a candidate of one file, with which it requests its extensions.
EXTENSION_IMPORTS = frozenset(
    ["torch.utils", EXTENSION_MODULE, *(f"{EXTENSION_MODULE}.{name}" for name in (*FUNCTIONS, *CONSTANTS))]
)
TORCH_CALLS = frozenset(
    "empty empty_like empty_strided zeros zeros_like Size device dtype no_grad inference_mode".split()
)
# Methods of tensors that allocate, view, copy or fill, and of Python's containers, numbers and strings. `to`
# and its like are refused when they convert to another dtype. `copy_` may convert, as an assignment may.
TENSOR_METHODS = frozenset(
    """new_empty new_zeros size numel dim stride data_ptr element_size contiguous view reshape permute
    transpose unsqueeze squeeze expand flatten detach is_contiguous view_as t clone zero_ fill_ copy_ split
    chunk unbind narrow select movedim to cuda float type_as get append items keys values index pop extend
    copy lower upper startswith endswith bit_length""".split()
)
# Methods that compute initial parameters and that `__init__` usually calls.
CONSTRUCTORS = frozenset("__init__ reset_parameters _reset_parameters init_weights _init_weights".split())
BUILTINS = frozenset(
    """int float bool len range tuple list dict min max abs sum zip enumerate isinstance super str round print
    sorted reversed""".split()
)
FORBIDDEN_NAMES = frozenset(
    """eval exec open compile getattr setattr delattr globals locals vars dir help memoryview __import__
    __builtins__ __loader__ __spec__ __build_class__ breakpoint input""".split()
)
# Attributes of generators, tracebacks and frames that lead to frames, and functions that execute text.
FORBIDDEN_ATTRIBUTES = frozenset(
    """gi_frame gi_code gi_yieldfrom cr_frame cr_code ag_frame ag_code tb_frame tb_next f_back f_builtins
    f_globals f_locals f_code eval exec import_module builtins""".split()
)
# Names that calls may begin with, as long as they have no other meaning in the file.
FIXED_NAMES = BUILTINS | {"self", "math", "cuda_extension"}
# Names of torch that may be used without a call, outside a kernel of Triton: types, dtypes and constants.
VALUES = re.compile(
    r"(?:\w+\.)*(?:Tensor|Module|Parameter|dtype|device|Size|no_grad|inference_mode|contiguous_format|inf|pi"
    r"|channels_last(?:_3d)?|preserve_format|Function"
    r"|b?float\d*|u?int\d*|half|double|long|short|bool)"
)
# Methods that give a tensor's values to Python or to another library. The operator blocker of the runner
# cannot block computations there.
OUT_OF_TORCH = frozenset("numpy tolist apply_ map_ map2_ storage untyped_storage".split())
# Functions that may be called in CONSTRUCTORS, which is the only place for most of them. They compute initial
# parameters there, which are replaced when load_state_dict loads the task's parameters. The functions of
# torch that lead past its operators, such as torch.library.get_kernel and torch.cuda.graph, are left out.
CONSTRUCTION_CALLS = re.compile(
    r"(?!(?:\w+\.)*(?:save|load|from_file|compile|CompilationUnit)$)(?:(?:torch\.)?nn\.(?:(?:functional|init|parameter|utils(?:\.parametrizations)?)\.)?(?:[A-Z]\w*\.)?\w+"
    r"|torch\.(?:linalg\.)?(?:[A-Z]\w*\.)?\w+"
    r"|torch\.cuda\.(?:is_available|device_count|current_device|current_stream|synchronize|get_device_\w+))"
)


# Registration of a candidate's own operators in C++, with their namespace.
OWN_OPERATORS = re.compile(r"\bTORCH_LIBRARY(?:_FRAGMENT)?\(\s*(?!aten\b|prim|torch)(\w+)\s*,")


def screen_files(files: dict[str, str]) -> str | None:
    """Return the reason why a candidate's files are refused, or None if they are accepted.

    A candidate is an implementation of a task's module that is judged. `files` maps the names of its files to
    their texts. A name must be `model_new.py` or `kernels/NAME` (`FILE_NAME`), because it becomes a path on
    the judge's machine. A text must be encodable in UTF-8, because it is sent in messages. model_new.py may
    have at most `MAX_MODEL_CHARACTERS`, and all files together `MAX_CANDIDATE_CHARACTERS`. The reason is
    `file_name:NAME`, `not_unicode:NAME` or `too_large`.
    """
    for name, text in files.items():
        if not FILE_NAME.fullmatch(name):
            return f"file_name:{name}"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"not_unicode:{name}"
    if (
        len(files.get("model_new.py", "")) > MAX_MODEL_CHARACTERS
        or sum(map(len, files.values())) > MAX_CANDIDATE_CHARACTERS
    ):
        return "too_large"
    return None


def uses_extensions(tree: ast.AST) -> bool:
    """Return whether a Python file imports torch.utils.cpp_extension; `tree` is the file's syntax tree."""
    return EXTENSION_MODULE in triton_screen.imported_modules(tree)


def called_function(call: ast.Call) -> str:
    """Return the name of the function that `call` calls if it is `load_inline` or `load`, and otherwise "".

    These functions of torch.utils.cpp_extension build and load a C++ or CUDA module. The call may name them
    alone, or after `cpp_extension.` or `torch.utils.cpp_extension.`.
    """
    name = ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""
    head, _, last = name.rpartition(".")
    return last if last in FUNCTIONS and head in ("", "cpp_extension", EXTENSION_MODULE) else ""


def without_unused_parts(tree: ast.Module) -> ast.Module:
    """Return the syntax tree of a model_new.py without the parts that the judge does not need.

    These parts are `get_inputs`, `get_init_inputs`, a block `if __name__ == "__main__"` without an `else`,
    the class `Model` if nothing else uses it, and statements `import …` (not `from … import …`) none of whose
    names is used. Published files often have these parts, and the screening would refuse the files because of
    them, although the judge does not run the parts. `tree` is not changed.
    """
    body = [
        node
        for node in tree.body
        if not (
            (isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"))
            or (isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == MAIN)
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


@dataclass(frozen=True)
class OwnKernels:
    """The names under which a file calls its own native functions and kernels, and those it gives a meaning.

    `extensions` are the names that the file binds only to results of `load_inline` or `load`, or to
    cuda_extension (the module of the functions in kernels/), and the namespaces `torch.ops.NAME` of the
    operators that C++ sources in its string constants register. `kernels` are the names that it binds only to
    kernels of Triton, and `modules` are those of `triton_screen.MODULES` that it binds only by imports.
    `packages` are all names of modules of torch and Triton. `rebound` are those of FIXED_NAMES that the file
    gives another meaning.
    """

    extensions: frozenset[str]
    kernels: frozenset[str]
    modules: frozenset[str]
    packages: frozenset[str]
    rebound: frozenset[str]


def _own_kernels(tree: ast.AST) -> OwnKernels:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    registered = {
        f"torch.ops.{name}" for text in texts if isinstance(text, str) for name in OWN_OPERATORS.findall(text)
    }
    bound, extensions, fixed = Counter[str](), Counter[str](), Counter[str]()
    kernels, modules, packages = Counter[str](), Counter[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(value=ast.Call() as call, targets=targets) if called_function(call):
                extensions.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.alias(name="cuda_extension", asname=str(name)):
                extensions[name] += 1
                bound[name] += 1
            case ast.arg(arg=name):
                bound[name] += 1
                fixed[name] += name == "self"
            case ast.alias(name=name, asname=other):
                fixed[name] += name in ("math", "cuda_extension") and other in (None, name)
                bound_name = other or name.partition(".")[0]
                bound[bound_name] += 1
                if name in triton_screen.IMPORTS | {"language", "libdevice", "math"}:
                    modules[bound_name] += 1
                if name.partition(".")[0] in PACKAGES:
                    packages.add(bound_name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound[name] += 1
                kernels[name] += triton_screen.is_kernel(node)
            case (
                ast.Name(id=str(name), ctx=ast.Store())
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                bound[name] += 1
    own, own_kernels, own_modules = (
        frozenset(name for name, count in counts.items() if 0 < count == bound[name])
        for counts in (extensions, kernels, modules)
    )
    rebound = frozenset(name for name in FIXED_NAMES if bound[name] > fixed[name])
    return OwnKernels(
        own | registered, own_kernels, own_modules & triton_screen.MODULES, frozenset(packages), rebound
    )


def _call_reason(call: ast.Call, in_init: bool, own: OwnKernels) -> str | None:
    if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name):
        name = call.func.value.id  # the launch of a kernel, KERNEL[grid](…)
        return None if name in own.kernels and "triton" in own.modules else f"call:{name}[]"
    name = triton_screen.dotted_name(call.func)
    head, _, last = name.rpartition(".")
    root = name.split(".")[0]
    if root in own.kernels:
        return f"call:{name}"
    if root in own.modules and name in triton_screen.CALLS:
        # Triton would load the compiled code in a file that this argument names.
        is_foreign = any(keyword.arg in (None, "ir_override") for keyword in call.keywords)
        return f"call:{name}(ir_override)" if name == "triton.Config" and is_foreign else None
    if root in own.rebound and not (root in BUILTINS and "." in name):
        return f"call:{name}"
    if root in ("cuda_extension", "math", "super", "self") or name in BUILTINS:
        return None
    if root in own.extensions or head in own.extensions:
        return None
    if called_function(call):
        return None
    if root == "?":
        return (
            None
            if last in TENSOR_METHODS or last == "__init__" or in_init
            else f"call:{last or 'expression'}"
        )
    if in_init and CONSTRUCTION_CALLS.fullmatch(name):
        return None
    if root in ("torch", "nn", "F"):
        is_allowed = (head == "torch" and last in TORCH_CALLS) or name == "torch.cuda.device"
        return None if is_allowed else f"call:{name}"
    # A function of the file is allowed, because its body is checked too. Other names fail when called.
    return None if not head or last in TENSOR_METHODS else f"call:{name}"


def _value_reason(node: ast.Attribute | ast.Name, own: OwnKernels, has_triton: bool) -> str | None:
    """Return the reason why a name that is not called is refused, such as `name:torch`, or None.

    A module of torch or Triton may not be a value, because its functions could then be called under another
    name. The same holds for functions and other modules of torch, except types, dtypes and constants
    (`VALUES`). A kernel may only be launched, because its attributes have the
    names of all modules.
    """
    name = triton_screen.dotted_name(node)
    root = name.partition(".")[0]
    if root in own.kernels:
        return f"name:{name}"
    if root not in own.packages or not isinstance(node.ctx, ast.Load):
        return f"attribute:{name}" if has_triton and root in own.packages and "." in name else None
    if "." not in name:
        return f"name:{name}"
    if root in own.modules:
        is_allowed = name in triton_screen.CALLS or bool(triton_screen.DTYPE.fullmatch(name))
    else:
        is_allowed = bool(VALUES.fullmatch(name)) or name.rpartition(".")[0] in own.extensions
    return None if is_allowed else f"attribute:{name}"


def _nodes(tree: ast.AST, own: OwnKernels) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node of a syntax tree, each with whether it is inside a function of CONSTRUCTORS.

    The bodies of kernels of Triton are left out; `triton_screen.body_reason` screens them. The traversal is
    not recursive, so that deeply nested code cannot exhaust the stack.
    """
    left = deque([(tree, False)])
    while left:
        node, in_init = left.popleft()
        in_init = in_init or (isinstance(node, ast.FunctionDef) and node.name in CONSTRUCTORS)
        yield node, in_init
        children = ast.iter_child_nodes(node)
        if triton_screen.is_kernel(node) and "triton" in own.modules:
            children = iter([*node.decorator_list, node.args, *([node.returns] if node.returns else [])])
        left.extend((child, in_init) for child in children)


def screen_python(code: str) -> str | None:
    """Return the reason why `code`, the text of model_new.py, is forbidden, or None if it is allowed.

    Code is forbidden if it could compute with torch instead of with kernels of its own, or if it could reach
    modules that it may not import. A reason is a kind and what was found, such as `import:os`,
    `call:torch.mm` or `operator:matmul`. Raises SyntaxError, ValueError, RecursionError or MemoryError if
    `code` cannot be parsed.
    """
    tree = parse_python(code)
    has_triton = triton_screen.uses_triton(tree)
    imports = IMPORTS | (EXTENSION_IMPORTS if uses_extensions(tree) else frozenset())
    imports |= triton_screen.IMPORTS if has_triton else frozenset()
    own = _own_kernels(tree)
    forbidden_in_kernels = FORBIDDEN_NAMES | (own.packages - own.modules)
    # Names that are called, or followed by an attribute, and are checked there. A parent precedes its parts.
    checked = set[int]()

    def reason_of(node: ast.AST, in_init: bool) -> str | None:
        """Return the reason why one node of the tree is forbidden, or None; the parts of it are not examined.

        `in_init` says whether the node is inside a function of `CONSTRUCTORS`.
        """
        match node:
            case ast.Import(names=names):
                return next((f"import:{one.name}" for one in names if one.name not in imports), None)
            case ast.ImportFrom(module=module):
                imported = {one.name for one in node.names} - FREE_NAMES.get(module or "", set())
                is_allowed = module in imports and all(f"{module}.{name}" in imports for name in imported)
                return None if is_allowed else f"import:{module}"
            case ast.BinOp(op=ast.MatMult()):
                return "operator:matmul"
            case ast.Attribute(attr=name) if (
                name in OUT_OF_TORCH
                or name in FORBIDDEN_ATTRIBUTES
                or (name.startswith("__") and name != "__init__")
                or (has_triton and name in triton_screen.KERNEL_FUNCTIONS)
            ):
                return f"attribute:{name}"
            case ast.Name(id=name) if name in FORBIDDEN_NAMES:
                return f"name:{name}"
            case ast.MatchClass():
                return "syntax:match"  # its keywords are names of attributes
            case ast.Attribute(value=value, attr=name) if triton_screen.dotted_name(value) == "typing":
                return None if name in typing.__all__ else f"attribute:typing.{name}"
            case ast.Call():
                return _call_reason(node, in_init, own)
            case ast.Attribute() | ast.Name() if id(node) not in checked:
                return _value_reason(node, own, has_triton)
            case ast.FunctionDef() if triton_screen.is_kernel(node) and "triton" in own.modules:
                return triton_screen.body_reason(node, own.modules, own.kernels, forbidden_in_kernels)
        return None

    for node, in_init in _nodes(tree, own):
        if isinstance(node, ast.Attribute):
            checked.add(id(node.value))
        elif isinstance(node, ast.Call):
            checked |= {id(node.func), id(getattr(node.func, "value", None))}
        if (reason := reason_of(node, in_init)) is not None:
            return reason
    return None
