"""Screening and building of a candidate, which is a workspace with kernels/ or a single Python file.

A single file requests its extensions from torch.utils.cpp_extension. The judge finds their sources in the
syntax tree, or else by running the file in a runner, and builds them before the file runs as a candidate.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from components.core.files import atomic_write, digest_json
from components.core.params import Sandbox
from components.core.records import FrozenModel
from components.core.text import parse_python
from components.judge.extension_sources import extensions_in, uses_extensions, without_unused_parts
from components.judge.rejection import Rejected
from components.judge.screen import screen_files, screen_python, screen_symbols
from components.sandbox.build import HEADER_SUFFIXES, SOURCE_SUFFIXES, Builder, BuildResult
from components.sandbox.compiler_flags import refused_flag
from components.sandbox.inside.inline_extension import BuiltExtension, Extension, extension_digest

# Errors of Python's parser and of functions on syntax trees; deep nesting raises the last two.
SYNTAX_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
# Modules whose kernels are compiled by processes, which a candidate may not start, while it runs.
COMPILED_AT_RUN_TIME = ("triton", "tilelang", "cutlass", "cupy", "numba")
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$")]


def _check_unicode(text: str) -> str:
    text.encode()  # UnicodeEncodeError is a ValueError, which pydantic reports.
    return text


# Text that can be written to a file; a string of Python may hold half of a surrogate pair.
Text = Annotated[str, AfterValidator(_check_unicode)]


Flags = Annotated[list[Annotated[Text, Field(max_length=200)]], Field(max_length=64)]


class CheckedExtension(FrozenModel):
    """Extension whose names, texts and sizes are checked, because they come from an untrusted candidate."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")]
    sources: dict[FileName, Annotated[Text, Field(max_length=1 << 20)]] = Field(min_length=1, max_length=16)
    cflags: Flags
    cuda_cflags: Flags
    ldflags: Flags


EXTENSIONS = TypeAdapter(Annotated[list[CheckedExtension], Field(max_length=16)])
# Function that runs a candidate's files and returns a JSON list of the extensions that they request.
Record = Callable[[dict[str, str]], bytes]


@dataclass(frozen=True)
class BuiltCandidate:
    """A built candidate: the files that its runner imports, and its libraries.

    `library` is the path of a file, or None if the candidate has no library. For a workspace the file is the
    library of kernels/. For a single Python file that requests extensions from torch.utils.cpp_extension,
    `library` is a concatenation of their libraries, and `extensions` has the offset and size of each.
    `extensions` is None if the candidate requests no extension. `failures` maps the name of each extension
    that does not compile to the compiler's messages; only candidates under sandbox.rules=any have such
    extensions.
    """

    # Digest of the files that were given.
    digest: str
    files: dict[str, str]
    library: Path | None
    extensions: tuple[BuiltExtension, ...] | None = None
    failures: dict[str, str] = field(default_factory=dict)


def build_candidate(
    files: dict[str, str], builder: Builder, rules: Sandbox, record: Record
) -> BuiltCandidate:
    """Screen and build a candidate, and return what its runner loads.

    `files` maps each workspace path to the text of the file, and `rules` are the parameters of the section
    sandbox. `record` is called if the candidate requests extensions whose sources do not follow from its
    syntax tree; it runs the files and returns these extensions. With sandbox.rules=any only the names and
    sizes of files are screened, a candidate may have no library, and an extension that does not compile is
    left out, because the file may catch the error that `load_inline` then raises. Raises Rejected if a file
    is refused, or if the candidate does not compile in the time limit.
    """
    is_screened = rules.rules == "kernel-only"
    tree = _parsed(files)
    digest = digest_json(sorted(files.items()))
    model = files["model_new.py"]
    has_extensions = uses_extensions(tree)
    found = None
    try:
        if is_screened and has_extensions:
            model = ast.unparse(without_unused_parts(tree))
        if not is_screened:
            _refuse_run_time_compilers(tree)
        if has_extensions:
            found = extensions_in(tree)
    except SYNTAX_ERRORS as error:
        raise Rejected("load_failed", "syntax", f"model_new.py: {error}") from error
    if is_screened:
        _screen(model)
    sources = {name: text for name, text in files.items() if name.endswith((".cpp", ".cu", *HEADER_SUFFIXES))}
    if has_extensions:
        runner_files = {"model_new.py": model, **sources}
        extensions = _checked(record(runner_files)) if found is None else _validated(found)
        if extensions:
            library, built, failures = _build_extensions(extensions, builder, is_screened=is_screened)
            return BuiltCandidate(digest, runner_files, library, built, failures)
    only_model = {"model_new.py": model}  # only the screened file can be imported
    if not is_screened and not any(name.endswith(SOURCE_SUFFIXES[builder.device]) for name in sources):
        return BuiltCandidate(digest, only_model, None)
    library = _library(builder.build(files), builder, is_screened=is_screened)
    return BuiltCandidate(digest, only_model, library)


def _parsed(files: dict[str, str]) -> ast.Module:
    if (reason := screen_files(files)) is not None:
        raise Rejected(
            "load_failed",
            reason,
            "a candidate is model_new.py and plain UTF-8 sources kernels/NAME, of moderate size.",
        )
    if "model_new.py" not in files:
        raise Rejected(
            "load_failed", "no_model_new", "model_new.py is missing: write class ModelNew(nn.Module)."
        )
    try:
        return parse_python(files["model_new.py"])
    except SYNTAX_ERRORS as error:
        raise Rejected("load_failed", "syntax", f"model_new.py: {error}") from error


def _screen(model: str) -> None:
    try:
        reason = screen_python(model)
    except SYNTAX_ERRORS as error:
        raise Rejected("load_failed", "syntax", f"model_new.py: {error}") from error
    if reason is not None:
        raise Rejected(
            "forbidden",
            reason,
            "model_new.py may allocate tensors and call cuda_extension; computing with torch is forbidden.",
        )


def _refuse_run_time_compilers(tree: ast.Module) -> None:
    """Raise Rejected if the file imports a module that compiles kernels, or calls torch.compile."""
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.partition(".")[0] in COMPILED_AT_RUN_TIME:
                raise Rejected(
                    "load_failed",
                    f"unsupported:{name.partition('.')[0]}",
                    f"{name} compiles kernels while the candidate runs; only kernels that the judge itself "
                    "builds, from load_inline, load or kernels/, are judged.",
                )
        if isinstance(node, ast.Attribute) and _is_torch_compile(node):
            raise Rejected(
                "load_failed",
                "unsupported:torch.compile",
                "torch.compile starts compilers while the candidate runs, which may start no process.",
            )


def _is_torch_compile(node: ast.Attribute) -> bool:
    return node.attr == "compile" and isinstance(node.value, ast.Name) and node.value.id == "torch"


def _validated(extensions: Sequence[Extension]) -> list[CheckedExtension]:
    try:
        return EXTENSIONS.validate_python(extensions)
    except ValidationError as error:
        raise _invalid(error) from error


def _checked(message: bytes) -> list[CheckedExtension]:
    try:
        return EXTENSIONS.validate_json(message)
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> Rejected:
    problem = error.errors()[0]
    field = ".".join(map(str, problem["loc"]))
    return Rejected("load_failed", "extension_sources", f"load_inline: {field}: {problem['msg']}")


def _build_extensions(
    extensions: list[CheckedExtension], builder: Builder, *, is_screened: bool
) -> tuple[Path | None, tuple[BuiltExtension, ...], dict[str, str]]:
    """Build all extensions, and return the file of their libraries, their places in it, and failed builds.

    The file is None if no extension compiles. Failed builds are the compiler's messages by name of the
    extension. Raises Rejected for CUDA sources on cpu, a refused compiler flag, a build that takes too long,
    and, if `is_screened` is set, an extension that does not compile or imports forbidden symbols.
    """
    libraries: dict[str, tuple[str, bytes]] = {}
    failures: dict[str, str] = {}
    for checked in extensions:
        extension: Extension = {
            "name": checked.name,
            "sources": checked.sources,
            "cflags": checked.cflags,
            "cuda_cflags": checked.cuda_cflags,
            "ldflags": checked.ldflags,
        }
        if builder.device == "cpu" and any(name.endswith(".cu") for name in checked.sources):
            raise Rejected(
                "load_failed",
                "cuda_sources",
                f"{checked.name}: has CUDA sources; judge it with --device cuda.",
            )
        flag = refused_flag([*checked.cflags, *checked.cuda_cflags, *checked.ldflags])
        if flag is not None:
            raise Rejected(
                "load_failed", f"flag:{flag}", f"{checked.name}: the compiler flag {flag} is not accepted."
            )
        result = builder.build_extension(extension)
        if result.library is None and not (result.timed_out or is_screened):
            failures[checked.name] = result.log
            continue
        library = _library(result, builder, is_screened=is_screened)
        libraries[extension_digest(extension)] = checked.name, library.read_bytes()
    if not libraries:
        return None, (), failures
    built, offset = [], 0
    for digest, (name, content) in libraries.items():
        built.append(BuiltExtension(digest=digest, name=name, offset=offset, size=len(content)))
        offset += len(content)
    bundle = builder.cache / f"{digest_json([entry['digest'] for entry in built])[:32]}.libraries"
    atomic_write(bundle, b"".join(content for _, content in libraries.values()))
    return bundle, tuple(built), failures


def _library(built: BuildResult, builder: Builder, *, is_screened: bool) -> Path:
    """Return the library of the finished build `built`; raise Rejected if the build failed.

    If `is_screened` is set, Rejected is also raised if the library imports forbidden symbols.
    """
    if built.timed_out:
        raise Rejected("timed_out", "build_limit", built.log)
    if built.library is None:
        raise Rejected("build_failed", "compiler", built.log)
    if is_screened and (reason := screen_symbols(built.symbols, builder.binding_symbols)) is not None:
        symbol = reason.partition(":")[2]
        raise Rejected("forbidden", reason, f"the library imports {symbol}, which kernels may not use.")
    return built.library
