"""Reading, screening and building of a candidate, which is a workspace with kernels/ or a single Python file.

A candidate is an implementation of a task's module that is judged. A single file requests its extensions,
which are C++ or CUDA modules, from torch.utils.cpp_extension. The judge finds their sources by running the
screened file in a runner (a sandboxed process), and builds them before the file runs as a candidate.
"""

import ast
import itertools
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, TypeAdapter, ValidationError

from components.core.errors import UserError
from components.core.files import digest_json
from components.core.params import Sandbox
from components.core.records import Device, FrozenModel
from components.core.text import parse_python
from components.core.workloads import SYNTAX_ERRORS
from components.judge import triton_screen
from components.judge.screen import (
    IMPORTS,
    screen_files,
    screen_python,
    uses_extensions,
    without_unused_parts,
)
from components.judge.symbol_screen import screen_symbols
from components.judge.verdict import Rejected
from components.sandbox.build import HEADER_SUFFIXES, SOURCE_SUFFIXES, Builder, BuildResult
from components.sandbox.compilers import refused_flag
from components.sandbox.inside.inline_extension import BuiltExtension, Extension, extension_digest

# Largest size of a file of a workspace, and largest number of files in its folder kernels/.
MAX_FILE_BYTES = 1 << 20
MAX_FILES = 200
# Modules whose kernels are compiled by processes, which a candidate may not start, while it runs.
COMPILED_AT_RUN_TIME = ("tilelang", "cutlass", "cupy", "numba")
# Addition to a syntax error of a file with a fence.
MARKDOWN_FENCE = (
    "; the file has a Markdown fence, as answers of chat models do: keep only the code between ```"
)
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$")]


Flags = Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=64)]
# Fields of an extension with flags.
FLAGS = ("cflags", "cuda_cflags", "ldflags")


class CheckedExtension(FrozenModel):
    """Extension whose names, texts and sizes are checked, because they come from an untrusted candidate.

    An extension is a C++ or CUDA module that a candidate (an implementation that is judged) requests from
    torch.utils.cpp_extension. `sources` maps file names to texts. `cflags` are the flags of the C++ compiler,
    `cuda_cflags` of nvcc, and `ldflags` of the linker.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")]
    sources: dict[FileName, Annotated[str, Field(max_length=1 << 20)]] = Field(min_length=1, max_length=16)
    cflags: Flags
    cuda_cflags: Flags
    ldflags: Flags


EXTENSIONS = TypeAdapter(Annotated[list[CheckedExtension], Field(max_length=16)])


def read_workspace(workdir: Path) -> dict[str, str]:
    """Return the texts of `model_new.py` and `kernels/*` in a workspace, by path relative to the workspace.

    A workspace is the folder of one candidate, an implementation that is judged. A file that does not exist
    is left out. Raises UserError if the folder does not exist, or if it has links, more than `MAX_FILES`
    files in kernels/, files of more than `MAX_FILE_BYTES`, or files that are not UTF-8 text.
    """
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such folder; give a workspace with model_new.py and kernels/.")
    files = {}
    kernels = workdir / "kernels"
    if kernels.is_symlink():
        raise UserError(f"{kernels}: a symbolic link; replace it by a folder.")
    paths = [workdir / "model_new.py", *sorted(itertools.islice(kernels.glob("*"), MAX_FILES + 1))]
    if len(paths) > MAX_FILES + 1:
        raise UserError(f"{kernels}: more than {MAX_FILES} files; a candidate has a few sources.")
    for path in paths:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path}: only plain files are judged; replace it by a file.")
        if path.is_file():
            # A name that is not Unicode is refused by the screening.
            files[os.fsencode(path.relative_to(workdir)).decode(errors="replace")] = _read(path)
    return files


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES} bytes; a candidate's file is source text.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text ({error.reason}); a candidate's file is source text."
        ) from error


def read_candidate(path: Path) -> dict[str, str]:
    """Return the texts of a candidate's files by workspace path, such as `model_new.py` or `kernels/add.cu`.

    A candidate is an implementation of a task's module that is judged. `path` is a workspace, a folder with
    these files, or a single Python file, which is returned as `model_new.py`. Raises UserError if the path
    does not exist or has a file that cannot be judged.
    """
    return {"model_new.py": _read(path)} if path.is_file() else read_workspace(path)


@dataclass(frozen=True)
class ScreenedCandidate:
    """The sources of a candidate that has passed the screening of files and of model_new.py.

    A candidate is an implementation of a task's module that is judged, and the screening refuses forbidden
    names and calls. `files` maps the workspace paths (`model_new.py`, `kernels/NAME`) of all files to their
    texts, as they were given. `model` is the text that runs in place of `files["model_new.py"]`. It has no
    byte order mark. With sandbox.rules=kernel-only it also lacks what a file that imports
    torch.utils.cpp_extension or Triton has without using it, such as `get_inputs`. `uses_extensions` is
    whether model_new.py imports torch.utils.cpp_extension, from which it may request extensions, and
    `uses_triton` whether it imports Triton.
    """

    files: dict[str, str]
    model: str
    uses_extensions: bool
    uses_triton: bool

    @property
    def runner_files(self) -> dict[str, str]:
        """Texts by workspace path of the files that a runner, the candidate's sandboxed process, gets.

        These are model_new.py with the text `model` and, if `uses_extensions` is set, the C++ and CUDA
        sources and headers that model_new.py may read.
        """
        suffixes = (".cpp", ".cu", *HEADER_SUFFIXES) if self.uses_extensions else ()
        sources = {name: text for name, text in self.files.items() if name.endswith(suffixes)}
        return {"model_new.py": self.model, **sources}


@dataclass(frozen=True)
class BuiltCandidate:
    """A built candidate: the files that its sandboxed process imports, and its libraries.

    A candidate is an implementation of a task's module that is judged. `digest` is the digest of the files
    that were given. `files` maps workspace paths to the texts that the sandboxed process gets. `library` is
    the content of the compiled shared library, which is empty if the candidate has none. For a workspace it
    is the library of kernels/. For a single Python file that requests extensions from
    torch.utils.cpp_extension, it is a concatenation of their libraries, and `extensions` has the offset and
    size of each in bytes. `extensions` is None if the candidate requests no extension. `failures` maps the
    name of each extension that does not compile to the compiler's messages; only candidates under
    sandbox.rules=any have such extensions. `uses_triton` is whether model_new.py imports Triton, and
    `triton_archive` has its compiled kernels (sandbox/inside/triton_cache.py), which are compiled anew for
    each task and each of its workloads; it is empty before.
    """

    digest: str
    files: dict[str, str]
    library: bytes
    extensions: list[BuiltExtension] | None = None
    failures: dict[str, str] = field(default_factory=dict)
    uses_triton: bool = False
    triton_archive: bytes = b""


def screen_candidate(files: dict[str, str], rules: Sandbox, device: Device) -> ScreenedCandidate:
    """Screen the sources of a candidate before any of them runs or is compiled, and return the sources.

    A candidate is an implementation of a task's module that is judged. `files` maps each workspace path to
    the text of the file, `rules` are all parameters of the section sandbox, and `device` is the one that
    the candidate is judged on. With sandbox.rules=any model_new.py may compute with torch; only the names and
    sizes of files are screened, and whether model_new.py would start a compiler while it runs. Triton is
    accepted on cuda only. Raises Rejected if a file is refused, or if model_new.py is missing or not valid
    Python.
    """
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
    model, reason = files["model_new.py"].removeprefix("\ufeff"), None
    try:
        tree = parse_python(model)
        has_extensions, has_triton = uses_extensions(tree), triton_screen.uses_triton(tree)
        if has_triton and device == "cpu":
            raise Rejected(
                "load_failed",
                "unsupported:triton",
                "kernels of Triton run on a GPU only; judge the candidate with --device cuda.",
            )
        if rules.rules == "any":
            _refuse_run_time_compilers(tree)
        else:
            model = ast.unparse(without_unused_parts(tree)) if has_extensions or has_triton else model
            reason = screen_python(model)
    except SYNTAX_ERRORS as error:
        hint = MARKDOWN_FENCE if "```" in model else ""
        raise Rejected("load_failed", "syntax", f"model_new.py: {error}{hint}") from error
    if reason is not None:
        text = "model_new.py may allocate tensors and call cuda_extension; computing with torch is forbidden."
        if reason.startswith("import:"):
            text = f"model_new.py may import {', '.join(sorted(IMPORTS))} only; --rules any allows others."
        elif reason.startswith("kernel:"):
            text = "the body of a kernel of Triton may name only functions of triton.language and variables."
        raise Rejected("forbidden", reason, text)
    return ScreenedCandidate(files, model, has_extensions, has_triton)


def build_candidate(
    candidate: ScreenedCandidate, builder: Builder, rules: Sandbox, requested: bytes
) -> BuiltCandidate:
    """Build a candidate's extensions or kernels/, and return what its sandboxed process loads.

    Extensions are C++ or CUDA modules that model_new.py requests from torch.utils.cpp_extension. `builder`
    compiles, and `rules` are all parameters of the section sandbox. `requested` is the JSON list of the
    extensions, `[]` if there are none. A sandboxed process reported it, so it is untrusted. If the
    list is not empty, kernels/ is not built. With sandbox.rules=any, or with Triton, a candidate may have no
    library. With sandbox.rules=any an extension that does not compile is left out, because the file may catch
    the error that `load_inline` then raises. Raises Rejected if the candidate does not compile or takes too
    long, or if an extension or an imported symbol is refused.
    """
    is_screened = rules.rules == "kernel-only"
    digest = digest_json(sorted(candidate.files.items()))
    if extensions := _validated(requested):
        library, built, failures = _build_extensions(extensions, builder, is_screened=is_screened)
        return BuiltCandidate(
            digest, candidate.runner_files, library, built, failures, uses_triton=candidate.uses_triton
        )
    only_model = {"model_new.py": candidate.model}  # only the screened file can be imported
    suffixes = SOURCE_SUFFIXES[builder.device]
    library = b""
    needs_library = is_screened and not candidate.uses_triton
    if needs_library or any(name.endswith(suffixes) for name in candidate.files):
        library = _library(builder.build(candidate.files), builder, is_screened=is_screened)
    return BuiltCandidate(digest, only_model, library, uses_triton=candidate.uses_triton)


def _refuse_run_time_compilers(tree: ast.Module) -> None:
    """Raise Rejected if the file imports a module such as numba, or mentions torch.compile.

    `tree` is the syntax tree of the file. The modules are those of `COMPILED_AT_RUN_TIME`, whose kernels are
    compiled while the candidate runs.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and triton_screen.dotted_name(node) == "torch.compile":
            raise Rejected(
                "load_failed",
                "unsupported:torch.compile",
                "torch.compile starts compilers while the candidate runs, which may start no process.",
            )
    for name in triton_screen.imported_modules(tree):
        package = name.partition(".")[0]
        if package in COMPILED_AT_RUN_TIME:
            raise Rejected(
                "load_failed",
                f"unsupported:{package}",
                f"{name} compiles kernels while the candidate runs; only kernels that the judge itself "
                "builds, from load_inline, load or kernels/, are judged.",
            )


def _validated(requested: bytes) -> list[CheckedExtension]:
    try:
        return EXTENSIONS.validate_json(requested)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise Rejected(
            "load_failed", "extension_sources", f"load_inline: {place}: {problem['msg']}"
        ) from error


def _build_extensions(
    extensions: list[CheckedExtension], builder: Builder, *, is_screened: bool
) -> tuple[bytes, list[BuiltExtension], dict[str, str]]:
    """Build all extensions, and return their joined libraries, the place of each in them, and failed builds.

    An extension is a C++ or CUDA module that a candidate requests from torch.utils.cpp_extension. The first
    result has the bytes of all libraries one after another, and the second one the offset and the size of
    each library. `is_screened` is set with sandbox.rules=kernel-only. Failed builds are the compiler's
    messages by name of the extension; there are none if `is_screened` is set. Raises Rejected for CUDA
    sources on cpu, a refused or malformed compiler flag, a build that takes too long, and, if `is_screened`
    is set, an extension that does not compile or imports forbidden symbols.
    """
    libraries, built, failures = b"", dict[str, BuiltExtension](), dict[str, str]()
    for checked in extensions:
        digest = extension_digest(cast(Extension, checked.model_dump()))
        try:
            checked = checked.model_copy(update={kind: _words(getattr(checked, kind)) for kind in FLAGS})
        except ValueError as error:
            raise Rejected("load_failed", "flag", f"{checked.name}: a compiler flag: {error}.") from error
        extension = cast(Extension, checked.model_dump())
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
        built[digest] = BuiltExtension(
            digest=digest, name=checked.name, offset=len(libraries), size=len(library)
        )
        libraries += library
    return libraries, list(built.values()), failures


def _readable(symbol: str) -> str:
    """Return the C++ name of a mangled symbol, or the symbol if c++filt is not installed."""
    if (program := shutil.which("c++filt")) is None:
        return symbol
    # On standard input, because arguments that begin with @ or - are options.
    done = subprocess.run([program], input=symbol, capture_output=True, text=True, check=False)
    return done.stdout.strip() or symbol


def _words(flags: list[str]) -> list[str]:
    """Split each item of `flags` at its unquoted blanks, as torch's build does, and return all parts.

    Raises ValueError if a flag has an unbalanced quote.
    """
    return [word for flag in flags for word in shlex.split(flag)]


def _library(built: BuildResult, builder: Builder, *, is_screened: bool) -> bytes:
    """Return the bytes of the library of the finished build `built`; raise Rejected if the build failed.

    If `is_screened` is set, as with sandbox.rules=kernel-only, Rejected is also raised if the library imports
    symbols that `screen_symbols` does not allow.
    """
    if built.timed_out:
        raise Rejected("timed_out", "build_limit", built.log)
    if built.library is None:
        raise Rejected("build_failed", "compiler", built.log)
    if is_screened and (reason := screen_symbols(built.symbols, builder.binding_symbols)) is not None:
        name = _readable(reason.partition(":")[2])
        raise Rejected(
            "forbidden",
            reason,
            f"the library imports {name}, which kernels may not use: they may call the C and C++ libraries, "
            "OpenMP, CUDA's runtime, allocate tensors and make views of them.",
        )
    return built.library
