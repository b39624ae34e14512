"""The source files on which the result of a stage depends, and digests that follow only their meaning.

The files of a stage are found from its first modules by following imports, also those inside functions. A
string that names a module, such as "components.policy.vllm_worker.Fingerprint", counts as an import. A string
that names a file or folder beside the module, or the template of workspaces, counts as a use of that file. A
sandbox has the folder of its modules as path, so an import may also name a module beside the importing one.
"""

import ast
import functools
from pathlib import Path

from components.core.config import PROJECT
from components.core.files import digest_bytes, digest_file

# Top folders of the project whose modules are followed, and the folder of the workspaces' template.
PACKAGES = ("components", "flows")
TEMPLATE = "agent_workdir"
# Modules that only declare and read parameters, whose values are part of a stage's key themselves.
DECLARATIONS = ("components/core/params.py", "components/core/config.py", "components/core/param_kinds.py")


@functools.cache
def source_digest(path: Path) -> str:
    """Return the digest of a source file.

    Comments, docstrings and formatting of a Python module do not change it. Other files are digested by their
    bytes, as is a module that cannot be parsed.
    """
    tree = _parsed(path)
    return digest_file(path) if tree is None else digest_bytes(ast.dump(tree).encode())


@functools.cache
def _parsed(path: Path) -> ast.Module | None:
    """Return the syntax tree of a Python module without bare strings, or None for any other file."""
    if path.suffix != ".py":
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_bare_string(statement)]
    return tree


def _is_bare_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _module_file(name: str) -> Path | None:
    """Return the file of the longest part of a dotted name that is a module of the project, or None."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    for length in range(len(parts), 0, -1):
        place = PROJECT.joinpath(*parts[:length])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


def _files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


@functools.cache
def _used_by(path: Path) -> frozenset[Path]:
    """Return the files of the project that a module imports or names, without itself."""
    tree = _parsed(path)
    if tree is None:
        return frozenset()
    names, texts = set[str](), set[str]()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pending += node.orelse
                continue
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                names |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.Constant(value=str(text)):
                texts.add(text)
        pending += ast.iter_child_nodes(node)
    modules = (_module_file(name) for name in names | {text for text in texts if "." in text})
    used = {module for module in modules if module is not None}
    beside = (path.with_name(f"{name.partition('.')[0]}.py") for name in names)
    used |= {module for module in beside if module.is_file()}
    for text in texts:
        place = path.parent / text
        if text == TEMPLATE:
            used |= _files_below(PROJECT / TEMPLATE)
        elif text.strip("./") and "/" not in text and len(text) < 100 and place.exists():
            used |= {place} if place.is_file() else _files_below(place)
    return frozenset(used - {path})


@functools.cache
def import_closure(*modules: str) -> frozenset[Path]:
    """Return the files of the modules and of all that they import, directly or not.

    Raises ValueError if there is no such module.
    """
    closure, pending = set[Path](), []
    for name in modules:
        path = _module_file(name)
        if path is None or _module_file(name.rpartition(".")[0]) == path:
            raise ValueError(f"{name}: there is no such module")
        pending.append(path)
    while pending:
        path = pending.pop()
        if path not in closure and path.relative_to(PROJECT).as_posix() not in DECLARATIONS:
            closure.add(path)
            pending += _used_by(path)
    return frozenset(closure)


def closure_digests(*modules: str) -> dict[str, str]:
    """Return the digest of every file in the import closure of `modules`, by its path in the project."""
    return {
        path.relative_to(PROJECT).as_posix(): source_digest(path) for path in sorted(import_closure(*modules))
    }


@functools.cache
def project_digests() -> dict[str, str]:
    """Return the digest of every source file of the project, by its path in the project."""
    files = sorted(path for top in (*PACKAGES, TEMPLATE) for path in _files_below(PROJECT / top))
    return {path.relative_to(PROJECT).as_posix(): source_digest(path) for path in files}
