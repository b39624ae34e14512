"""The compilers of candidates' kernels: their flags, and what the output of a failed build says.

A candidate is an implementation of a task's module, with kernels of its own, that is to be judged.
"""

import importlib.util
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from components.core.errors import UserError
from components.core.records import Device
from components.sandbox.inside.inline_extension import Extension
from components.sandbox.isolation import PathMap

CPU_FLAGS = (
    *("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=c++17", "-fPIC", "-fvisibility=hidden"),
)
# Flag for full AVX-512 vectors, which torch uses too; by default g++ uses vectors of half that width.
X86_FLAGS = ("-mprefer-vector-width=512",)
# Without NVTX_DISABLE, algorithms of CUB and Thrust load a profiler's library, which the screening refuses.
CUDA_FLAGS = (
    *("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden"),
    *("-cudart=shared", "-DNVTX_DISABLE"),
)
# Flags with which torch compiles CUDA sources of extensions.
TORCH_CUDA_FLAGS = (
    *("-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__"),
    *("-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr"),
)
# Pattern of an include of torch's headers. It allows only blanks and tabs between words, because matching
# line breaks there would take quadratic time.
TORCH_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"](?:torch|ATen|c10)/", re.MULTILINE)


# Pattern of the name of a -f flag that changes the code of a library. It has none of the flags that change
# which files the compiler reads or writes, or what it prints.
CODE_FLAG = (
    r"PIC|pic|aligned-new|asynchronous-unwind-tables|builtin|common|concepts|coroutines|data-sections"
    r"|delete-null-pointer-checks|exceptions|expensive-optimizations|fast-math|forward-propagate|fp-contract"
    r"|function-sections|gcse|gnu-unique|if-conversion2?|lto|math-errno|omit-frame-pointer|openmp(?:-simd)?"
    r"|permissive|plt|rename-registers|rtti|schedule-insns2?|semantic-interposition|sized-deallocation"
    r"|stack-protector(?:-strong)?|template-depth|threadsafe-statics|unwind-tables|visibility|web|wrapv"
    r"|(?:align|associative|constexpr|cx|devirtualize|excess|finite|graphite|inline|ipa|loop|merge|modulo|move"
    r"|optimize|partial|peel|prefetch|reciprocal|reorder|rounding|signaling|signed|simd|single|split"
    r"|strict|trapping|tree|unroll|unsafe|unswitch|vect|version-loops|visibility)-[a-z0-9-]+"
)
# Pattern of the flags of an extension that are passed to the compiler. No other flag is accepted, because
# some flags name files and programs, and others would have the compiler write no library, or errors in
# another form.
EXTENSION_FLAG = re.compile(
    rf"-O[0-3]|-Ofast|-f(?:no-)?(?:{CODE_FLAG})(?:=[a-z0-9-]+)?"
    r"|-m(?:avx|fma|sse|f16c|prefer-vector-width=)[a-z0-9.]*"
    r"|-D[A-Za-z_]\w*(?:=[\w.+-]*)?|-U\w+|--?use_fast_math|--?maxrregcount=\d+|-?-ftz=\w+|-?-fmad=\w+"
    r"|-?-prec-(?:div|sqrt)=\w+|--expt-(?:relaxed-constexpr|extended-lambda)|--extended-lambda"
)
# Pattern of the flags that are left out, because the judge sets them itself or they change no code.
IGNORED_FLAG = re.compile(
    r"-std=[\w+]+|-f(?:no-)?diagnostics-[\w=-]+|-march=[\w-]+|-mtune=[\w-]+|-g|-w|-v"
    r"|--?(?:generate-)?line-?info|-W(?!p,|a,|l,)[\w=-]*|--?verbose|--?ptxas-options=.*|-Xptxas(?:=.*)?"
    r"|-gencode(?:=.*)?|-arch=\w+|--?gpu-architecture=\w+|arch=compute_\w+,code=\w+|--?threads=?\d*"
    r"|-Xcompiler|-pthread|-lc(?:udart|10)"
    r"|-l(?:m|pthread|gomp|cublas|cublasLt|cudnn|torch|torch_cpu|torch_python)"
)


def refused_flag(flags: Iterable[str]) -> str | None:
    """Return the first of an extension's compiler flags that is not accepted, or None if all are accepted."""
    known = (EXTENSION_FLAG, IGNORED_FLAG)
    return next((flag for flag in flags if not any(one.fullmatch(flag) for one in known)), None)


def extension_flags(extension: Extension, device: Device) -> list[str]:
    """Return the compiler's options for the flags that an extension requests.

    Flags that match IGNORED_FLAG are left out. On cpu the flags for CUDA sources are left out too. On cuda,
    each flag for the C++ compiler is passed on by -Xcompiler, and torch's flags for CUDA sources are added.
    """
    cflags, cuda_cflags = (
        [flag for flag in extension[kind] if not IGNORED_FLAG.fullmatch(flag)]
        for kind in ("cflags", "cuda_cflags")
    )
    if device == "cpu":
        return cflags
    return [*TORCH_CUDA_FLAGS, *(f"-Xcompiler={flag}" for flag in cflags), *cuda_cflags]


def compiler(device: Device) -> str:
    """Return the path of the compiler, g++ for cpu or nvcc for cuda; raise UserError if it is missing."""
    name, remedy = (
        ("nvcc", "install the CUDA toolkit or put nvcc on PATH")
        if device == "cuda"
        else ("g++", "run apt-get install -y g++")
    )
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        raise UserError(f"device={device}: the compiler {name} is not installed; {remedy}.")
    return path


def kernel_flags(device: Device) -> list[str]:
    """Return the compiler flags that every build of kernels for `device` on this machine uses."""
    if device == "cpu":
        return [*CPU_FLAGS, *(X86_FLAGS if platform.machine() == "x86_64" else ())]
    import torch

    major, minor = torch.cuda.get_device_capability()
    return [*CUDA_FLAGS, f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"]


def processor_features() -> str:
    """Return the line of /proc/cpuinfo with the processor's instruction sets, or "" if there is none.

    The line is part of the cache key of builds, because -march=native builds may not run on another
    processor.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


# Words of sources that use a library: its name, and names of the template's header cuda_libraries.h.
VENDOR_WORDS = {"cublas": ("cublas", "matrix_product"), "cudnn": ("cudnn", "Convolution")}


def library_flags(sources: Iterable[str], device: Device, paths: PathMap) -> list[str]:
    """Return the compiler flags for the libraries (torch, cuBLAS, cuDNN) that the source texts use.

    Folders in the flags are paths inside the sandbox, translated with `paths`.
    """
    texts = list(sources)
    flags = _torch_flags(device, paths) if any(map(TORCH_HEADER.search, texts)) else []
    if device == "cuda":
        for name, words in VENDOR_WORDS.items():
            if any(word in text for text in texts for word in words):
                flags += _vendor_flags(name, paths)
    return flags


def _torch_flags(device: Device, paths: PathMap) -> list[str]:
    """Return the compiler flags for torch's headers and libraries.

    Folders in the flags are paths inside the sandbox, translated with `paths`.
    """
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
    """Return the compiler flags for one of NVIDIA's libraries, where `name` is "cublas" or "cudnn".

    They refer to the copy in an installed Python package, which torch uses, or else to the copy in the CUDA
    toolkit. Folders in the flags are paths inside the sandbox, translated with `paths`.
    """
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations or [] if package is not None else []
    libraries = sorted(path for folder in folders for path in Path(folder).glob(f"*/lib/lib{name}.so*"))
    if not libraries:
        return [f"-l{name}"]
    folder = libraries[0].parent
    return [
        f"-I{paths.inside(folder.parent)}/include",
        f"-L{paths.inside(folder)}",
        "-Xlinker",
        f"-l:{libraries[0].name}",
    ]


# Maximum output of a compiler or of nm that is read.
MAX_OUTPUT_BYTES = 1 << 20
# Exit code of the build script if the compiler ran and reported a failure, or if its library is unusable.
COMPILER_FAILED = 65
# Exit codes after signals that end a compiler because of the sources: it crashed, or exceeded its own limits
# of output and CPU time.
COMPILER_CRASHED = frozenset(
    128 + number
    for number in (
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
        *(signal.SIGSEGV, signal.SIGXCPU, signal.SIGXFSZ),
    )
)
# Pattern of the messages of compilers and linkers about a source.
DIAGNOSTIC = re.compile(
    r"(?i)\b(?:error|fatal)\s*(?::|#\d)|sorry, unimplemented:|undefined reference"
    r"|(?:out of memory|exhausted)\b"
)
# Pattern of whole lines with which a compiler says that the machine ended or refused one of its processes. A
# source could print such a line, but only in an error of its own, which is a further line. The pattern allows
# no text after that of the compiler, where an error of the source would go on.
MACHINE_FAULT = re.compile(
    r"\S+: (?:fatal|internal compiler) error: (?:Killed|Terminated) signal terminated program \S+"
    r"|\S+: fatal error: \S+ terminated with signal \d+ \[(?:Killed|Terminated)\](?:, core dumped)?"
    r"|\S+: fatal error: cannot execute [^:]*: \w+:"
    r" (?:Resource temporarily unavailable|Cannot allocate memory)"
    r"|nvcc error\s*: '[^']+' died due to signal (?:9|15)\b[^:]*"
)
# Pattern of words of a shell or compiler that the machine refused something, in output without diagnostics.
MACHINE_WORDS = re.compile(
    r"(?i)cannot fork|cannot execute|cannot allocate memory|temporarily unavailable|permission denied"
    r"|no space left|input/output error|not found"
)
# Pattern of what compilers say about a process that a signal ended. The signal can come from outside, so the
# failure of such a build is not cached.
SIGNALLED = re.compile(
    r"signal terminated program|terminated with signal|died due to signal"
    r"|internal compiler error: (?:Segmentation fault|Bus error|Aborted)"
)
# Pattern of these messages if the process had used up its CPU time.
TIME_USED_UP = re.compile(r"CPU time limit exceeded|died due to signal 24\b")


def is_compiler_error(result: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a failed build ended because of its sources, not because of the machine.

    `result` is the ended process of the build, whose stderr has the compiler's output. The result is False if
    the sandbox could not be made, a process could not be started, or the machine ended a process. It is True
    for a compiler that printed more than is read, or that crashed, because only the sources can cause that.
    A compiler that failed with a message in which neither an error of a source nor a failure of the machine
    is recognised counts as failed because of its sources, since sources can have unusual errors.
    """
    if result.returncode != COMPILER_FAILED:
        return result.returncode in COMPILER_CRASHED
    # Only line breaks end lines, because a source can put other separators into the text of an error.
    lines = [line.strip() for line in result.stderr.split("\n") if line.strip()]
    others = [line for line in lines if not MACHINE_FAULT.fullmatch(line)]
    if any(map(DIAGNOSTIC.search, others)) or len(result.stderr.encode()) >= MAX_OUTPUT_BYTES:
        return True
    return len(others) == len(lines) > 0 and not MACHINE_WORDS.search(result.stderr)


def is_signalled(result: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a signal ended a process of a failed build, so that another try may succeed.

    `result` is the ended process of the build, whose stderr has the compiler's output. A build that succeeded
    gives False.
    """
    if result.returncode == COMPILER_FAILED:
        return bool(SIGNALLED.search(result.stderr))
    return result.returncode > 128
