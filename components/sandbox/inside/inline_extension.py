"""Extensions that a candidate of one Python file requests from torch.utils.cpp_extension.

A candidate is an implementation of a PyTorch module, to be judged. `load_inline` and `load` of torch start a
compiler, which a candidate must not do. The judge therefore builds the extensions beforehand, and `install`
replaces both functions by one that returns the built modules. `record` finds the sources of the extensions by
running the candidate's file. The judge and the code inside the sandbox import this module. It imports nothing
of the project, and it imports torch only inside the sandbox.
"""

import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

# What torch writes before the sources, unless `no_implicit_headers` is set.
CPP_HEADERS = "#include <torch/extension.h>\n"
CUDA_HEADERS = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
FUNCTIONS = ("load_inline", "load")
# Further names of torch.utils.cpp_extension that files import; their values say whether there is a toolkit.
CONSTANTS = ("CUDA_HOME", "ROCM_HOME")


class Extension(TypedDict):
    """One C++ or CUDA extension to build: its module name, source texts by file name, and compiler flags.

    `cflags` are for C++ sources, `cuda_cflags` for CUDA sources, and `ldflags` for linking. They are the
    flags that the code which requests the extension gives.
    """

    name: str
    sources: dict[str, str]
    cflags: list[str]
    cuda_cflags: list[str]
    ldflags: list[str]


class BuiltExtension(TypedDict):
    """A built extension, and the place of its library in the file that holds all libraries of a candidate.

    A candidate is an implementation of a PyTorch module, to be judged. `digest` is that of the extension's
    sources and compiler flags (`extension_digest`), and `name` its module name. `offset` and `size` of the
    library are in bytes.
    """

    digest: str
    name: str
    offset: int
    size: int


def extension_digest(extension: Extension) -> str:
    """Return the SHA-256 of an extension's sources and compiler flags, in hexadecimal digits.

    The name is left out, because the code that requests the extension may choose another name in each
    process.
    """
    parts = [extension["sources"], extension["cflags"], extension["cuda_cflags"], extension["ldflags"]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _texts(value: Any) -> list[str]:
    """Return the items of an argument that is a string (one item), a sequence of strings, or None (none)."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(item) for item in value]


def inline_extension(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: Any = None,
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Any = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Any = None,
    build_directory: Any = None,
    verbose: Any = False,
    with_cuda: Any = None,
    with_sycl: Any = None,
    is_python_module: Any = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: Any = True,
    use_pch: Any = False,
    no_implicit_headers: bool = False,
) -> Extension:
    """Return the extension that a call of torch's `load_inline` with these arguments builds.

    As in torch, the generated binding of `functions` follows the C++ sources. `extra_include_paths`,
    `build_directory` and the arguments that do not change the module are ignored.
    """
    headers = ("", "") if no_implicit_headers else (CPP_HEADERS, CUDA_HEADERS)
    cpp = headers[0] + "\n".join(_texts(cpp_sources))
    if functions is not None:
        documented = functions if isinstance(functions, Mapping) else {f: f for f in _texts(functions)}
        wrapped = "torch::wrap_pybind_function({0})" if with_pytorch_error_handling else "{0}"
        lines = [
            f'm.def("{function}", {wrapped.format(function)}, {json.dumps(text)});'
            for function, text in documented.items()
        ]
        cpp += "\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n" + "\n".join(lines) + "\n}\n"
    sources = {"main.cpp": cpp}
    if cuda := _texts(cuda_sources):
        sources["cuda.cu"] = headers[1] + "\n".join(cuda)
    return {
        "name": name,
        "sources": sources,
        "cflags": _texts(extra_cflags),
        "cuda_cflags": _texts(extra_cuda_cflags),
        "ldflags": _texts(extra_ldflags),
    }


def file_extension(
    name: str,
    sources: str | Sequence[str],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Any = None,
    extra_ldflags: Sequence[str] | None = None,
    *_: Any,
    **__: Any,
) -> Extension:
    """Return the extension that a call of torch's `load` with these arguments builds.

    `sources` are paths, and the texts of these files are read. Raises OSError if a file cannot be read.
    Further arguments are ignored.
    """
    return {
        "name": name,
        "sources": {Path(path).name: Path(path).read_text() for path in _texts(sources)},
        "cflags": _texts(extra_cflags),
        "cuda_cflags": _texts(extra_cuda_cflags),
        "ldflags": _texts(extra_ldflags),
    }


def _replace_functions(load: Callable[[Extension, bool], Any]) -> None:
    """Replace torch.utils.cpp_extension by a module whose functions `load_inline` and `load` build nothing.

    Each of the two returns the result of the function that is given here as `load`. This function is called
    with the extension that the arguments of the call describe, and with the argument `is_python_module` of
    the call, which is True by default.
    """
    import torch.utils

    def replacement(describe: Callable[..., Extension]) -> Callable[..., Any]:
        def function(*args: Any, **options: Any) -> Any:
            return load(describe(*args, **options), options.get("is_python_module", True))

        return function

    module = types.ModuleType("torch.utils.cpp_extension")
    vars(module).update(
        load_inline=replacement(inline_extension),
        load=replacement(file_extension),
        CUDA_HOME="/usr/local/cuda" if torch.version.cuda else None,
        ROCM_HOME=None,
    )
    sys.modules[module.__name__] = module
    vars(torch.utils)["cpp_extension"] = module


def install(built: list[BuiltExtension], libraries: bytes, suffix: str) -> None:
    """Write the built libraries to files, and make torch's `load_inline` and `load` return their modules.

    `libraries` has the bytes of all libraries, at the offsets that `built` gives, and `suffix` is the suffix
    of their file names. If a later call of `load_inline` or `load` has `is_python_module=False`, the library
    is loaded for the operators that it registers (TORCH_LIBRARY). A later call with sources that are not
    among `built` raises RuntimeError, as torch does if the compiler fails.
    """
    import torch

    known: dict[str, tuple[str, Path]] = {}
    for number, entry in enumerate(built):
        path = Path(f"extension_{number}{suffix}").absolute()
        path.write_bytes(libraries[entry["offset"] : entry["offset"] + entry["size"]])
        known[entry["digest"]] = (entry["name"], path)

    def load(extension: Extension, is_python_module: bool) -> Any:
        digest = extension_digest(extension)
        if digest not in known:
            raise RuntimeError(
                f"Error building extension '{extension['name']}': "
                "the judge has built no extension with these sources"
            )
        name, path = known[digest]
        if not is_python_module:
            return torch.ops.load_library(path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _replace_functions(load)


class _Recorded:
    """Stand-in for an extension that is not built yet: every attribute is a function that returns None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def record(files: Mapping[str, str], init_inputs: list[Any]) -> list[Extension]:
    """Import a candidate's model_new.py, and return the extensions that this file requests.

    A candidate is an implementation of a PyTorch module, to be judged, and `files` maps the paths of its
    files to their texts. If the import requests no extension, the file's class `ModelNew` is constructed too,
    with the arguments `init_inputs`. An error of the file is ignored if the file has requested an extension
    before, because the objects that replace extensions compute nothing and may cause the error. Otherwise the
    error is raised.
    """
    found: list[Extension] = []

    def load(extension: Extension, _: bool) -> _Recorded:
        found.append(extension)
        return _Recorded()

    _replace_functions(load)
    write_files(files)
    try:
        model = importlib.import_module("model_new").ModelNew
        if not found:
            model(*init_inputs)
    except Exception:
        if not found:
            raise
    return found


def write_files(files: Mapping[str, str]) -> None:
    """Write a candidate's files to the working folder, and add this folder to sys.path for their import.

    A candidate is an implementation of a PyTorch module, to be judged, and `files` maps the paths of its
    files to their texts. Python files are written with a byte order mark, with which Python refuses an
    encoding declaration (PEP 263) other than UTF-8. Otherwise the imported code could differ from the text
    that the judge has screened.
    """
    sys.path.insert(0, str(Path.cwd()))
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = "\ufeff" if name.endswith(".py") else ""
        path.write_text(mark + text.removeprefix("\ufeff"), encoding="utf-8")
