"""Compilers for candidates' kernels, and their flags."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from components.core.config import Device
from components.core.errors import UserError
from components.sandbox.isolation import PathMap

CPU_FLAGS = (
    *("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=c++17", "-fPIC", "-fvisibility=hidden"),
)
X86_FLAGS = ("-mprefer-vector-width=512",)
"""g++ uses half of AVX-512's width by default, and torch all of it."""
CUDA_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart=shared")
TORCH_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"](?:torch|ATen|c10)/", re.MULTILINE)
"""An include of torch's headers, as in the public workspace format.

Blanks of one line only, or matching takes quadratic time.
"""


def compiler(device: Device) -> str:
    """Return the path of g++ or nvcc; raise UserError where it is not installed."""
    name, mend = (
        ("nvcc", "install the CUDA toolkit or put nvcc on PATH")
        if device == "cuda"
        else ("g++", "run apt-get install -y g++")
    )
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        raise UserError(f"device={device}: the compiler {name} is not installed; {mend}.")
    return path


def kernel_flags(device: Device) -> list[str]:
    """Return the flags of every build on this machine."""
    if device == "cpu":
        return [*CPU_FLAGS, *(X86_FLAGS if platform.machine() == "x86_64" else ())]
    import torch

    major, minor = torch.cuda.get_device_capability()
    return [*CUDA_FLAGS, f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"]


def processor_features() -> str:
    """Return the instruction sets that -march=native compiles for.

    A cache may be shared with a machine that lacks some.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def library_flags(sources: Iterable[str], device: Device, paths: PathMap) -> list[str]:
    """Return the flags for the libraries that the texts of `sources` use.

    Folders as they are named inside the sandbox.
    """
    texts = list(sources)
    flags = _torch_flags(device, paths) if any(map(TORCH_HEADER.search, texts)) else []
    if device == "cuda":
        for name in ("cublas", "cudnn"):
            if any(name in text for text in texts):
                flags += _vendor_flags(name, paths)
    return flags


def _torch_flags(device: Device, paths: PathMap) -> list[str]:
    """Return the flags for torch's headers and libraries."""
    from torch.utils.cpp_extension import include_paths, library_paths

    names = [
        "c10",
        "torch_cpu",
        "torch",
        "torch_python",
        *(["c10_cuda", "torch_cuda"] if device == "cuda" else []),
    ]
    return [
        "-std=c++20",
        *(f"-I{paths.inside(path)}" for path in include_paths(device)),
        *(f"-L{paths.inside(path)}" for path in library_paths()),
        *(f"-l{name}" for name in names),
    ]


def _vendor_flags(name: str, paths: PathMap) -> list[str]:
    """Return the flags for one of NVIDIA's libraries.

    The copy that torch installed as a package, or else the toolkit's.
    """
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations or [] if package is not None else []
    libraries = sorted(path for folder in folders for path in Path(folder).glob(f"*/lib/lib{name}.so*"))
    if not libraries:
        return [f"-l{name}"]
    folder = libraries[0].parent
    include = f"-I{paths.inside(folder.parent)}/include"
    return [include, f"-L{paths.inside(folder)}", "-Xlinker", f"-l:{libraries[0].name}"]
