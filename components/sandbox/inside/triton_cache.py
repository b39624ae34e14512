"""Kernels of Triton, which are compiled in one sandboxed process and loaded in another, timed one.

Triton compiles a kernel at its first call with programs such as ptxas, and a timed candidate may start no
program. So the candidate is called once in a process of the role `compile_triton`, and what Triton writes to
its cache there, compiled kernels and the choices of `triton.autotune`, is given to the timed process as an
archive. This file runs only inside the sandbox.
"""

import contextlib
import importlib
import io
import os
import zipfile
from typing import Any, NoReturn

# Triton's cache. The path is relative, because Triton stores the paths of the kernel's files in it and
# processes without isolation have different working folders.
FOLDER = "triton"
VARIABLES = {
    "TRITON_CACHE_DIR": FOLDER,
    "TRITON_CACHE_AUTOTUNING": "1",
    "TRITON_STORE_BINARY_ONLY": "1",
}
# Compute capabilities of GPUs, each as ten times its major version plus its minor version.
CAPABILITIES = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
# Functions of Triton that start programs and keep their results, as module, name and arguments.
PROGRAM_CALLS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("triton.runtime.build", "platform_key", ()),
    ("triton.runtime.cache", "triton_key", ()),
    ("triton.backends.nvidia.driver", "library_dirs", ()),
    *(("triton.backends.nvidia.compiler", "get_ptxas_version", (number,)) for number in CAPABILITIES),
)
COMPILED_AGAIN = (
    "Triton has to compile another kernel in a timed call: every call may launch only what the first call "
    "with inputs of get_inputs() launches, with arguments of the same types, alignment and constexpr values"
)


def warm_up_triton() -> None:
    """Import Triton, set its variables, and start the programs whose results it needs in every process.

    Calls that this version of Triton does not have, or that fail because there is no GPU, are left out.
    """
    os.environ.update(VARIABLES)
    for module, name, arguments in PROGRAM_CALLS:
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(module), name)(*arguments)


def save(descriptor: int) -> None:
    """Write the files of Triton's cache to the empty file `descriptor` as a zip archive."""
    with open(descriptor, "wb", closefd=False) as file, zipfile.ZipFile(file, "w") as archive:
        for folder, _, names in os.walk(FOLDER):
            for name in names:
                archive.write(os.path.join(folder, name))


def load(archive: bytes) -> None:
    """Unpack the archive that `save` has written, and make every further compilation an error.

    Files are only written below the working folder, whatever names the archive has.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        file.extractall()
    with contextlib.suppress(ImportError):
        knobs = importlib.import_module("triton.knobs")
        compiler = importlib.import_module("triton.backends.nvidia.compiler")
        compiler.CUDABackend.add_stages = _refuse
        knobs.build.impl = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(COMPILED_AGAIN)
