"""Find the source files on which the result of a stage depends, and compute digests of their meaning.

The files of a stage are found from the modules that the caller names by following imports, also those inside
functions. A string that names a module, such as "components.policy.vllm.worker.Fingerprint", counts as an
import. A string that is the name of a file in the module's own folder counts as a use of that file, and the
name of a folder there, or of the template of workspaces `agent_workdir`, as a use of all files in it. Code
that runs in a sandbox imports modules of its own folder by their bare names; these imports are followed too.
Comments, docstrings and formatting do not change the digest of a module.

Parsing all sources takes seconds, so what is read from each source (its imports, its strings and a digest of
its syntax tree, see `_Facts`) is stored in the user's cache under the digest of the source's bytes.
"""

import ast
import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

from components.core.config import PROJECT
from components.core.files import atomic_write, digest_bytes, digest_file, user_cache
from components.core.python_source import parse_python

# Top folders of the project whose modules are followed, and the folder of the workspaces' template.
PACKAGES = ("components", "flows")
TEMPLATE = "agent_workdir"
# Modules that only declare and read parameters. They do not count as sources of a stage, because the values
# of the parameters are part of its key.
DECLARATIONS = ("components/core/params.py", "components/core/config.py", "components/core/param_kinds.py")


# Strings in a source with at least this many characters are not taken for names of files.
MAX_FILE_NAME = 100


class _Facts(NamedTuple):
    """The facts that are read from the source of one Python module.

    `content` is the SHA-256 of the source's bytes, and `digest` that of its syntax tree without docstrings.
    `names` are the dotted names that the module imports, and `texts` its strings that may name files.
    """

    content: str
    digest: str
    names: tuple[str, ...]
    texts: tuple[str, ...]


@functools.cache
def source_digest(path: Path) -> str:
    """Return the digest of a source file.

    Comments, docstrings and formatting of a Python module do not change it. Other files are digested by their
    bytes, as is a module that cannot be parsed.
    """
    facts = _facts(path)
    return digest_file(path) if facts is None else facts.digest


@functools.cache
def _facts(path: Path) -> _Facts | None:
    """Return the facts of a Python module, which are read from the user's cache if they are stored there.

    Returns None for a file that is no Python module or cannot be parsed.
    """
    if path.suffix != ".py":
        return None
    content = path.read_bytes()
    key = digest_bytes(content)
    kept = _kept_facts().get(key)
    if kept is not None:
        return kept
    tree = _parsed(content)
    return None if tree is None else _facts_of(tree, key)


def _cache_file() -> Path:
    """Return the path of the file in the user's cache that stores the facts of this checkout's modules.

    Its name is a digest of the checkout's path, of Python's version and of this module's source. The last two
    are included because they determine which facts are read from a source.
    """
    origin = f"{PROJECT}\n{sys.version}\n{digest_file(Path(__file__))}"
    return user_cache("sources") / f"{digest_bytes(origin.encode())[:16]}.json"


@functools.cache
def _kept_facts() -> dict[str, _Facts]:
    """Return the facts that the user's cache stores, by the digest of each module's bytes.

    The result is empty if the file is missing or damaged.
    """
    try:
        kept = json.loads(_cache_file().read_bytes()).items()
        return {key: _Facts(key, digest, tuple(names), tuple(texts)) for key, (digest, names, texts) in kept}
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged: the sources are parsed
        return {}


def _keep_facts(files: list[Path]) -> None:
    """Write the facts of the Python modules among `files` to the user's cache, and drop all others from it.

    Nothing is written if the cache already stores exactly these facts.
    """
    modules = {facts.content: facts for path in files if (facts := _facts(path))}
    if modules != _kept_facts():
        atomic_write(_cache_file(), json.dumps({key: facts[1:] for key, facts in modules.items()}))


def _parsed(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a Python module without its docstrings, or None if the source is not valid.

    Other strings that are statements of their own are removed too.
    """
    try:
        tree = parse_python(content)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_bare_string(statement)]
    return tree


def _facts_of(tree: ast.Module, content: str) -> _Facts:
    """Return the facts of a module with the syntax tree `tree`, whose bytes have the digest `content`.

    Imports under `if TYPE_CHECKING` are left out.
    """
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
            case ast.Constant(value=str(text)) if len(text) < MAX_FILE_NAME and "/" not in text:
                texts.add(text)
        pending += ast.iter_child_nodes(node)
    digest = digest_bytes(ast.dump(tree).encode())
    return _Facts(content, digest, tuple(sorted(names)), tuple(sorted(texts)))


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
    """Return the files of the project that the module at `path` imports or names in a string.

    The file of the module itself is left out.
    """
    facts = _facts(path)
    if facts is None:
        return frozenset()
    names, texts = facts.names, facts.texts
    modules = (_module_file(name) for name in (*names, *(text for text in texts if "." in text)))
    used = {module for module in modules if module is not None}
    beside = (path.with_name(f"{name.partition('.')[0]}.py") for name in names)
    used |= {module for module in beside if module.is_file()}
    for text in texts:
        place = path.parent / text
        if text == TEMPLATE:
            used |= _files_below(PROJECT / TEMPLATE)
        elif text.strip("./") and place.exists():
            used |= {place} if place.is_file() else _files_below(place)
    return frozenset(used - {path})


@functools.cache
def import_closure(*modules: str) -> frozenset[Path]:
    """Return the files of modules, and all files of the project that they use, directly or indirectly.

    `modules` are dotted names. Modules that only declare parameters (`DECLARATIONS`) are left out. Raises
    ValueError if there is no module of such a name.
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
    found = {path.relative_to(PROJECT).as_posix(): source_digest(path) for path in files}
    _keep_facts(files)
    return found
