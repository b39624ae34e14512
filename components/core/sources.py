"""Find the source files on which the result of a stage depends, and compute their digests.

A stage is a step of the pipeline, whose result is stored under a key that contains these digests. The files
of a stage are found from the modules that the caller names: grimp follows their imports, also those inside
functions. Files that are used without an import are found by folder: data files beside a module, such as
templates, and the folders in USED_WITHOUT_IMPORT. Comments, docstrings and formatting do not change the
digest of a module.
"""

import ast
import functools
from pathlib import Path

import grimp

from components.core.config import PROJECT
from components.core.files import digest_bytes, digest_file
from components.core.text import parse_without_docstrings

# Folders with sources and with the template of workspaces.
FOLDERS = ("components", "flows", "agent_workdir")
# Modules that only declare and read parameters. They do not count as sources of a stage, because the values
# of the parameters are part of its key.
DECLARATIONS = (
    "components.core.params",
    "components.core.promotion_params",
    "components.core.stage_params",
    "components.core.config",
)
# Folders whose files are used by a package or a module without an import: code that is started in a sandbox
# by its path, a class that vLLM loads by its name, and the template of workspaces.
USED_WITHOUT_IMPORT = {
    "components.sandbox": ("components/sandbox/inside", "agent_workdir"),
    "components.policy.vllm": ("components/policy/vllm",),
    "components.policy.prompts": ("agent_workdir",),
}


@functools.cache
def source_digest(path: Path) -> str:
    """Return the digest of a source file, as 64 hexadecimal digits.

    Comments, docstrings and formatting of a Python module do not change it. Other files are digested by their
    bytes, as is a module that cannot be parsed.
    """
    if path.suffix != ".py":
        return digest_file(path)
    try:
        return digest_bytes(ast.dump(parse_without_docstrings(path.read_bytes())).encode())
    except (SyntaxError, ValueError):
        return digest_file(path)


def _files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def _module_file(name: str) -> Path:
    place = PROJECT.joinpath(*name.split("."))
    file = place.with_suffix(".py")
    return file if file.is_file() else place / "__init__.py"


@functools.cache
def _import_graph() -> grimp.ImportGraph:
    graph = grimp.build_graph("components", exclude_type_checking_imports=True, cache_dir=None)
    for name in DECLARATIONS:
        graph.remove_module(name)
    return graph


@functools.cache
def import_closure(*modules: str) -> frozenset[Path]:
    """Return the paths of modules, and of all files of the project that they use, directly or indirectly.

    `modules` are dotted names. Modules that only declare parameters (`DECLARATIONS`) are left out. Data files
    beside a module of the result count as used. Raises ValueError if there is no module of such a name.
    """
    graph, reached = _import_graph(), set(modules)
    for name in modules:
        if name not in graph.modules:
            raise ValueError(f"{name}: there is no such module")
        reached |= graph.find_upstream_modules(name)
    files = {_module_file(name) for name in reached}
    files |= {
        path
        for folder in {file.parent for file in files}
        for path in folder.glob("[!.]*.*")
        if path.is_file() and path.suffix != ".py"
    }
    for used_by, folders in USED_WITHOUT_IMPORT.items():
        if any(f"{name}.".startswith(f"{used_by}.") for name in reached):
            files |= {path for folder in folders for path in _files_below(PROJECT / folder)}
    return frozenset(files)


def closure_digests(*modules: str) -> dict[str, str]:
    """Return the digest of every file that `import_closure` finds, by its path in the project.

    These are the files of `modules` (dotted names) and those that they use, directly or indirectly. A digest
    has 64 hexadecimal digits. Raises ValueError if there is no module of such a name.
    """
    return {
        path.relative_to(PROJECT).as_posix(): source_digest(path) for path in sorted(import_closure(*modules))
    }


@functools.cache
def project_digests() -> dict[str, str]:
    """Return the digest of every file below the project's source folders, by its path in the project.

    The folders are components, flows and agent_workdir. Files in __pycache__ are left out. A digest has 64
    hexadecimal digits.
    """
    files = sorted(path for top in FOLDERS for path in _files_below(PROJECT / top))
    return {path.relative_to(PROJECT).as_posix(): source_digest(path) for path in files}
