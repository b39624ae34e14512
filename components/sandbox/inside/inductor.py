"""Prepare torch.compile inside the sandbox, and pack and unpack the files that a compilation leaves.

torch.compile is prepared in a zygote, a process that runners (sandboxed processes) are forked from. A runner
packs the files of a compilation into an archive. The judge, the trusted process outside, keeps the archive
without reading it, and gives it to the next runner that compiles the same task, the PyTorch module that is to
be made faster (components/judge/compile_cache.py). This file runs only inside the sandbox.
"""

import contextlib
import importlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch


class CompileArtefacts:
    """The folder in which Inductor and Triton store the files of a compilation by torch.compile.

    It is the folder `inductor` in the private working folder of this process. It holds generated sources,
    compiled kernels, compiled graphs and the results of autotuning.
    """

    def __init__(self, descriptor: int):
        """Create the folder, have torch use it, and unpack into it the zip archive in the file `descriptor`.

        If the file is empty, nothing is unpacked. If the archive cannot be unpacked, it is ignored: the
        folder is removed with its content, and no error is raised.
        """
        self.folder = Path.cwd() / "inductor"
        self.folder.mkdir(exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        os.environ["TRITON_CACHE_DIR"] = str(self.folder / "triton")
        # Names of the files that the judge's cache has.
        self.unpacked: set[str] = set()
        if os.fstat(descriptor).st_size:
            try:
                self._unpack(descriptor)
                self.unpacked.update(self.files())
            except Exception:  # a task's source may have written anything
                shutil.rmtree(self.folder)

    def _unpack(self, descriptor: int) -> None:
        with open(descriptor, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                # An existing file may be a library that this process has loaded in an earlier role.
                if not (self.folder / name).exists():
                    archive.extract(name, self.folder)

    def files(self) -> list[str]:
        """Return the paths of the files that `save` puts into an archive, relative to `folder`.

        Kernels in Triton's folder are left out. Inductor stores the kernels that it uses in its compiled
        graphs too, and kernels that were compiled only to be timed by max-autotune would make an archive many
        times as large. Triton's libraries for the host are included.
        """
        names = [path.relative_to(self.folder) for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return [str(name) for name in names if name.parts[0] != "triton" or name.suffix == ".so"]

    def save(self, descriptor: int) -> None:
        """Write all files that torch.compile has made to the empty file `descriptor`, as a zip archive.

        The file stays empty if nothing was compiled besides what the constructor has unpacked, or if the
        archive cannot be written, for example because it is too large.
        """
        files = self.files()
        if self.unpacked.issuperset(files):
            return
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.seek(0)
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    for name in files:
                        archive.write(self.folder / name, name)
        except OSError:
            os.ftruncate(descriptor, 0)


def warm_up_inductor(folder: str) -> None:
    """Compile one function, so that later compilations with Inductor on cpu are faster.

    Most of the time of a first compilation is spent on precompiling headers, which are stored in `folder`,
    and on finding out the processor's instruction sets, which stay in memory and are inherited by fork.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/kernels"
    tempfile.tempdir = folder  # Inductor stores precompiled headers here and not in its cache folder
    torch.compile(lambda x: torch.sigmoid(x).sum(-1))(torch.ones(64, 64))
    torch._dynamo.reset()
    tempfile.tempdir = None


# Modules that torch 2.11 imports only during its first compilation for a GPU. A module that the installed
# version of torch does not have is skipped.
LATE_IMPORTS = (
    "torch._dynamo.backends.inductor",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._inductor.choices",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.quantization",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "sympy.tensor.tensor",
    "triton.backends.nvidia.compiler",
    "triton.compiler.code_generator",
)


def import_inductor() -> None:
    """Import the modules that compiling for a GPU needs, without initialising CUDA.

    CUDA must not be initialised before a fork. One of the modules (`_inductor.runtime.benchmarking`) calls
    torch.cuda.is_available when it is imported, which would initialise CUDA, so a function that returns True
    replaces it during the imports. A module that the installed torch does not have is skipped.
    """
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        for name in ("torch._inductor.compile_fx", *LATE_IMPORTS):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = is_available
