"""Building a candidate's kernels, inside the same walls, once per content.

Only the kernels are compiled: the binding module (pybind11) is compiled once for all homes of a user and linked, so that a cpu
candidate builds in a fraction of a second instead of the ten or more that torch's headers cost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pybind11

from components.core.config import PROJECT, Device, Sandbox
from components.core.errors import InfrastructureError, UserError
from components.core.files import atomic_write, digest_json, remove_stale, user_cache
from components.sandbox import clock, isolation
from components.sandbox.runner_factory import KEPT_SECONDS

TEMPLATE = PROJECT / "agent_workdir"
EXTENSION_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CPU_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
)
X86_FLAGS = ("-mprefer-vector-width=512",)
"""g++ uses half of AVX-512's width unless told, and torch all of it: one loop read 1.13 times as fast as eager and 1.38 with this."""
CUDA_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart=shared")
TORCH_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"](?:torch|ATen|c10)/", re.MULTILINE)
"""A source of the public workspace's form, with torch's own headers; it builds in 10 to 30 s, the light form in less than one. Blanks
of one line only: where they may be line ends, 100,000 of those took 32 s with the interpreter's lock held."""
MAX_LIBRARY_BYTES = 64 << 20
MAX_MEMORY_BYTES = 8 << 30
MAX_LOG_BYTES = 8000
MAX_SAID_BYTES = 1 << 20
TOO_MANY = "too_many_symbols"
"""Stands in a list of imported symbols that is too long to be read to its end; no allow-list has it."""
CACHE_FORMAT = 4
"""Part of every cached build's name; raise it when what is cached changes its form or meaning."""


@dataclass(frozen=True)
class BuildResult:
    """A built library, or why there is none: the compiler's words, or `forbidden` for a symbol that may not be imported."""

    library: Path | None
    log: str = ""
    symbols: tuple[str, ...] = ()
    timed_out: bool = False


def compiler(device: Device) -> str:
    """The path of g++ or nvcc; UserError with the mend when there is none."""
    name = "nvcc" if device == "cuda" else "g++"
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        mend = (
            "install the CUDA toolkit or put nvcc on PATH"
            if device == "cuda"
            else "run apt-get install -y g++"
        )
        raise UserError(f"device={device}: the compiler {name} is not installed; {mend}.")
    return path


def _processor() -> str:
    """What -march=native compiles for here: a home may move to, or be shared with, a machine without some instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _architecture() -> list[str]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"]


def _torch_arguments(device: Device, view: isolation.PathMap) -> list[str]:
    """Flags for sources that include torch's headers: its folders, the language they need, the libraries, which are loaded already."""
    from torch.utils.cpp_extension import include_paths, library_paths

    libraries = [
        "c10",
        "torch_cpu",
        "torch",
        "torch_python",
        *(["c10_cuda", "torch_cuda"] if device == "cuda" else []),
    ]
    flags = [f"-I{view.inside(path)}" for path in include_paths(device)] + [
        f"-L{view.inside(path)}" for path in library_paths()
    ]
    return ["-std=c++20", *flags, *(f"-l{name}" for name in libraries)]


def _vendor_arguments(texts: Iterable[str], view: isolation.PathMap) -> list[str]:
    """Flags for cuBLAS and cuDNN where a source names them: torch's own copies, installed as packages, or else the toolkit's."""
    found = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (found.submodule_search_locations or [])] if found is not None else []
    arguments = []
    for name in ("cublas", "cudnn"):
        if not any(name in text for text in texts):
            continue
        libraries = sorted(library for folder in folders for library in folder.glob(f"*/lib/lib{name}.so*"))
        if libraries:
            place = libraries[0].parent
            arguments += [
                f"-I{view.inside(place.parent)}/include",
                f"-L{view.inside(place)}",
                "-Xlinker",
                f"-l:{libraries[0].name}",
            ]
        else:
            arguments.append(f"-l{name}")
    return arguments


def build_result_channel() -> Path:
    """The folder of result_channel.cpp compiled, a module that every runner imports: made once for all homes of a user."""
    source = Path(__file__).with_name("result_channel.cpp")
    command = [
        compiler("cpu"),
        "-O2",
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
        f"-I{pybind11.get_include()}",
        f"-I{sysconfig.get_path('include')}",
    ]
    folder = (
        user_cache("binding").resolve()
        / f"result_channel-{digest_json([source.read_text(), command, pybind11.__version__, EXTENSION_SUFFIX])[:32]}"
    )
    library = folder / f"result_channel{EXTENSION_SUFFIX}"
    if not library.exists():
        with tempfile.TemporaryDirectory() as scratch:
            result = subprocess.run(
                [*command, str(source), "-o", f"{scratch}/library"],
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode != 0:
                raise InfrastructureError(f"result_channel.cpp does not compile: {result.stderr[-2000:]}")
            atomic_write(library, Path(scratch, "library").read_bytes())
    return folder


class Builder:
    """Builds by content: equal kernels, flags and template give the library that is already there."""

    def __init__(self, sandbox: Sandbox, device: Device, cache: Path):
        self.sandbox = sandbox
        self.device = device
        self.cache = cache.resolve()
        self.cache.mkdir(parents=True, exist_ok=True)
        remove_stale(self.cache, KEPT_SECONDS)
        self.compiler = compiler(device)
        self.flags = (
            [*CUDA_FLAGS, *_architecture()]
            if device == "cuda"
            else [*CPU_FLAGS, *(X86_FLAGS if platform.machine() == "x86_64" else ())]
        )
        template = {
            name: (TEMPLATE / name).read_text() for name in ("binding.cpp", "binding_registry.h", "vec.h")
        }
        self.toolchain_digest = digest_json(
            [
                CACHE_FORMAT,
                template,
                self.flags,
                self.compiler,
                pybind11.__version__,
                EXTENSION_SUFFIX,
                _processor(),
            ]
        )
        self.shared = user_cache("binding").resolve()
        self.shared.mkdir(parents=True, exist_ok=True)
        self.binding = self.shared / f"binding-{self.toolchain_digest[:32]}.o"
        self.view = self._view() if sandbox.isolation == "bubblewrap" else isolation.HOST_PATHS
        places = (TEMPLATE, pybind11.get_include(), sysconfig.get_path("include"))
        self.includes = [f"-I{self.view.inside(place)}" for place in places]
        try:
            self.binding_symbols = self._make_binding()
            if device == "cpu":
                self.includes.insert(0, f"-I{self.view.inside(self._make_headers())}")
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(
                f"the judge's own binding did not compile in sandbox.build_seconds ({sandbox.build_seconds:g} s): raise it."
            ) from error

    def _view(self) -> isolation.PathMap:
        """What a compiler sees besides the sources of one build."""
        view = isolation.python_paths() | {
            TEMPLATE: "/template",
            self.shared: "/shared",
            Path(pybind11.get_include()): "/pybind11",
        }
        toolkit = Path(self.compiler).resolve().parent.parent
        return (
            view if self.device == "cpu" or toolkit.is_relative_to("/usr") else view | {toolkit: str(toolkit)}
        )

    def _make_binding(self) -> frozenset[str]:
        symbols = self.binding.with_suffix(".symbols")
        if not symbols.exists():
            with self._folder() as folder:
                source = self.view.inside(TEMPLATE / "binding.cpp")
                command = [
                    compiler("cpu"),
                    "-O1",
                    "-fPIC",
                    "-std=c++17",
                    "-fvisibility=hidden",
                    *self.includes,
                    "-c",
                    source,
                ]
                result, names = self._compile(folder, command, "binding.o")
                if result.returncode != 0:
                    raise InfrastructureError(f"binding.cpp does not compile: {result.stderr[-2000:]}")
                atomic_write(self.binding, (folder / "out" / "binding.o").read_bytes())
                atomic_write(symbols, "\n".join(names))
        return frozenset(symbols.read_text().split())

    def _make_headers(self) -> Path:
        """A folder with binding_registry.h precompiled, where the compiler looks first: half of what a small kernel's build costs."""
        headers = self.shared / f"headers-{self.toolchain_digest[:32]}"
        name = "binding_registry.h"
        if not (headers / f"{name}.gch").exists():
            with self._folder() as folder:
                out = Path(self._inside(folder).inside(folder / "out"), f"{name}.gch")
                command = [
                    self.compiler,
                    *self.flags,
                    "-x",
                    "c++-header",
                    self.view.inside(TEMPLATE / name),
                    "-o",
                    str(out),
                ]
                result = self._confined(folder, command)
                if result.returncode != 0:
                    raise InfrastructureError(f"{name} does not compile: {result.stderr[-2000:]}")
                headers.mkdir(exist_ok=True)
                headers.chmod(0o755)
                atomic_write(headers / name, (TEMPLATE / name).read_text())
                atomic_write(headers / f"{name}.gch", (folder / "out" / f"{name}.gch").read_bytes())
        return headers

    def _compile(
        self, folder: Path, command: list[str], name: str, *look: str
    ) -> tuple[subprocess.CompletedProcess[str], tuple[str, ...]]:
        """Compile to the file `name` of `folder`'s out and list the symbols that it imports: both inside one sandbox, since each costs
        as much as a small compilation."""
        out = str(Path(self._inside(folder).inside(folder / "out"), name))
        quoted = shlex.quote(out)
        script = f'"$@" >&2 && test -f {quoted} && test ! -L {quoted} && exec nm --undefined-only --format=posix {" ".join(look)} {quoted}'
        result = self._confined(folder, ["/bin/sh", "-c", script, "sh", *command, "-o", out])
        names = tuple(line.split()[0] for line in result.stdout.splitlines() if line.strip())
        if len(result.stdout.encode()) >= MAX_SAID_BYTES:
            names = (TOO_MANY,)
        if (
            result.returncode == 0 and not names
        ):  # every library imports something: our binding's Py_ functions at least
            raise InfrastructureError(f"nm failed on a built library: {result.stderr[-500:]}")
        return result, names

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder for one build: sources in `in`, what the compiler writes in `out`."""
        with tempfile.TemporaryDirectory(dir=self.cache, prefix="build-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for path in (folder, folder / "in", folder / "in" / "kernels", folder / "out"):
                path.mkdir(exist_ok=True)
                path.chmod(0o755)  # whatever the umask: root's compilers have another uid
            if isolation.can_change_uid():
                os.chown(folder / "out", isolation.BUILDER, isolation.BUILDER)
            yield folder

    def _inside(self, folder: Path) -> isolation.PathMap:
        """Where one build's folders are for its compiler."""
        return (
            isolation.HOST_PATHS
            if self.view is isolation.HOST_PATHS
            else isolation.PathMap({folder / "in": "/in", folder / "out": "/out"})
        )

    def _confined(self, folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run one compiler command with the sources read-only and only `out` writable."""
        pass_fds: tuple[int, ...] = ()
        environment: Mapping[str, str] = isolation.BUBBLEWRAP_ENVIRONMENT
        if self.sandbox.isolation == "bubblewrap":
            isolated = isolation.bubblewrap(
                device="cpu",
                paths=self.view | {folder / "in": "/in"},
                writable={"/out": folder / "out"},
                temporary_bytes=1 << 29,
                keep_capabilities=False,
            )
            filter_fd = os.memfd_create("seccomp")
            os.write(filter_fd, isolation.seccomp_program("baseline"))
            os.lseek(filter_fd, 0, os.SEEK_SET)
            pass_fds = (filter_fd,)
            limits = isolation.with_limits(
                command,
                memory_bytes=MAX_MEMORY_BYTES,
                file_bytes=MAX_LIBRARY_BYTES,
                seconds=self.sandbox.build_seconds,
            )
            command = [
                *isolated[:-1],
                "--setenv",
                "TMPDIR",
                "/tmp",
                "--seccomp",
                str(filter_fd),
                "--",
                *limits,
            ]
        else:
            environment = os.environ | {"TMPDIR": f"{folder}/out"}
        # Into files, which the limits of the command hold for: a compiler can be made to talk without end.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=errors,
                    pass_fds=pass_fds,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
                code = clock.wait(process, self.sandbox.build_seconds)
            finally:
                for descriptor in pass_fds:
                    os.close(descriptor)
            said = [
                (file.seek(0), file.read(MAX_SAID_BYTES).decode(errors="replace"))[1]
                for file in (out, errors)
            ]
        return subprocess.CompletedProcess(command, code, said[0], said[1])

    def build(self, files: dict[str, str]) -> BuildResult:
        """Compile and link `kernels/*`; the result is cached by content, failures too (a compiler is deterministic)."""
        sources = {name: text for name, text in sorted(files.items()) if self._is_source(name)}
        if not sources:
            return BuildResult(
                None,
                "kernels/ holds no source file: write kernels/NAME"
                + (".cu" if self.device == "cuda" else ".cpp"),
            )
        headers = {
            name: text
            for name, text in sorted(files.items())
            if name.startswith("kernels/") and name.endswith((".h", ".cuh", ".hpp"))
        }
        stem = self.cache / digest_json([self.toolchain_digest, sources, headers])[:32]
        library, symbols, failed = (stem.with_suffix(s) for s in (".so", ".symbols", ".failed"))
        for path in (library, symbols, failed):
            with contextlib.suppress(OSError):  # not there, or somebody else's
                os.utime(path)
        if symbols.exists():
            return BuildResult(library, symbols=tuple(symbols.read_text().split()))
        if failed.exists():
            return BuildResult(None, failed.read_text())
        with self._folder() as folder:
            given = (
                sources | headers | {"binding_registry.h": (TEMPLATE / "binding_registry.h").read_text()}
            )  # the public form includes it by "../"
            for name, text in given.items():
                path = folder / "in" / name
                path.write_text(text)
                path.chmod(0o644)
            place = self._inside(folder).inside(folder / "in")
            units = [f"{place}/{name}" for name in sources]
            command = [
                self.compiler,
                *self.flags,
                *self.includes,
                f"-I{place}/kernels",
                "-shared",
                *units,
                self.view.inside(self.binding),
            ]
            if any(TORCH_HEADER.search(text) for text in (sources | headers).values()):
                command += _torch_arguments(self.device, self.view)
            if self.device == "cuda":
                command += _vendor_arguments((sources | headers).values(), self.view)
            try:
                result, names = self._compile(folder, command, "library.so", "-D")
            except subprocess.TimeoutExpired:
                return BuildResult(
                    None, f"the build took longer than {self.sandbox.build_seconds:g} s", timed_out=True
                )
            if result.returncode in (
                126,
                127,
            ):  # a wall or the compiler did not start: nothing that the sources did
                raise InfrastructureError(f"the compiler could not be started: {result.stderr[-500:]}")
            if result.returncode != 0:
                log = result.stderr.replace(f"{place}/", "").replace(f"{self.view.inside(TEMPLATE)}/", "")
                atomic_write(failed, log[:MAX_LOG_BYTES])
                return BuildResult(None, log[:MAX_LOG_BYTES])
            atomic_write(library, (folder / "out" / "library.so").read_bytes())
            atomic_write(symbols, "\n".join(names))  # last: its presence says that the library is complete
        return BuildResult(library, symbols=names)

    def _is_source(self, name: str) -> bool:
        return (
            name.startswith("kernels/")
            and name.count("/") == 1
            and name.endswith((".cu", ".cpp") if self.device == "cuda" else (".cpp",))
        )
