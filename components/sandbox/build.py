"""Builds of candidates' kernels and extensions, cached by their content.

A candidate is an implementation of a task's module that is to be judged, and a workspace the folder with its
files. Compilers of candidates' sources run inside a sandbox unless sandbox.isolation is "none". Of a
workspace, only the files in kernels/ are compiled for each candidate. The binding module
(agent_workdir/binding.cpp, with pybind11) is compiled once for each user of the machine and linked to every
build of kernels. So a cpu candidate builds in a fraction of a second instead of more than ten seconds, which
compiling with torch's headers takes.
"""

import contextlib
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pybind11

from components.core.config import PROJECT
from components.core.errors import InfrastructureError
from components.core.files import (
    atomic_write,
    check_executable,
    digest_bytes,
    digest_json,
    remove_stale,
    user_cache,
)
from components.core.params import Sandbox
from components.core.records import Device
from components.sandbox import isolation
from components.sandbox.compilers import (
    COMPILER_FAILED,
    MAX_OUTPUT_BYTES,
    TIME_USED_UP,
    compiler,
    extension_flags,
    is_compiler_error,
    is_signalled,
    kernel_flags,
    library_flags,
    processor_features,
)
from components.sandbox.inside.inline_extension import Extension
from components.sandbox.preflight import check_isolation
from components.sandbox.runner_factory import CACHE_SECONDS, INSIDE_FOLDER, RunnerFactory
from components.sandbox.runner_process import wait_for_exit

TEMPLATE = PROJECT / "agent_workdir"
EXTENSION_SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")
SOURCE_SUFFIXES = {"cpu": (".cpp",), "cuda": (".cu", ".cpp")}
HEADER_SUFFIXES = (".h", ".cuh", ".hpp")
# Maximum size of a file that a compiler may write.
MAX_LIBRARY_BYTES = 64 << 20
# Maximum address space of a compiler.
MAX_MEMORY_BYTES = 8 << 30
# Capacity of a compiler's /tmp.
TEMPORARY_BYTES = 1 << 29
# Maximum length of the compiler output in a verdict.
MAX_LOG_BYTES = 8000
# Number of times that a build is tried if a signal ended a process of it, or if it took too long.
ATTEMPTS = 2
# Limit of a compiler's CPU time, as a share of that of its wall time, which is then used up first only on a
# busy machine.
CPU_SHARE = 0.9
# Symbol that replaces a list of imported symbols longer than MAX_OUTPUT_BYTES. No list of allowed symbols
# contains it, so the candidate is rejected.
TOO_MANY_SYMBOLS = "too_many_symbols"
# Number that is included in the name of every cached build. Increase it if the format or the meaning of the
# cached files changes.
CACHE_FORMAT = 6


@dataclass(frozen=True)
class BuildResult:
    """The content of a built library with the symbols that it imports, or the output of a failed build.

    `symbols` has the names of the symbols, such as `malloc`. `library` is None if the build failed, `log`
    then has the output or the reason, and `timed_out` says whether the build used up its time.
    """

    library: bytes | None
    log: str = ""
    symbols: tuple[str, ...] = ()
    timed_out: bool = False


def compile_own(source: Path, target: Path, flags: Sequence[str]) -> None:
    """Compile a C++ source of this project to the file `target`, unless that file exists.

    The source is trusted, so the compiler runs outside the sandbox. Raises InfrastructureError if the source
    does not compile, and UserError if the compiler is not installed.
    """
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "output")
        command = [compiler("cpu"), *flags, str(source), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise InfrastructureError(f"{source.name} does not compile: {result.stderr[-2000:]}")
        atomic_write(target, output.read_bytes())


def build_result_channel() -> Path:
    """Return the folder of the module compiled from result_channel.cpp, which every runner imports.

    A runner (sandboxed process) on cpu sends its results with this module. The module is compiled if the
    user's cache does not contain it. Raises InfrastructureError if it does not compile, and UserError if the
    compiler is not installed.
    """
    source = INSIDE_FOLDER / "result_channel.cpp"
    flags = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-shared"]
    flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    key = [source.read_text(), compiler("cpu"), flags, pybind11.__version__, EXTENSION_SUFFIX]
    folder = user_cache("binding").resolve() / f"result_channel-{digest_json(key)[:32]}"
    compile_own(source, folder / f"result_channel{EXTENSION_SUFFIX}", flags)
    return folder


def symbol_names(listing: str) -> tuple[str, ...]:
    """Return the names of the symbols in `listing`, the output of `nm --format=posix`."""
    return tuple(line.split()[0] for line in listing.splitlines() if line.strip())


def open_factory(sandbox: Sandbox, device: Device, folder: Path) -> RunnerFactory:
    """Return the factory of a judge's runners (sandboxed processes), whose files are below `folder`.

    Raises IsolationUnavailable if runners cannot be isolated here, and UserError if programs in `folder`
    cannot be executed.
    """
    check_isolation(sandbox, device)
    folder.mkdir(parents=True, exist_ok=True)
    check_executable(folder, "give another folder with --home")
    return RunnerFactory(sandbox, device, folder / "runners", build_result_channel())


class Builder:
    """Builder of libraries from candidates' kernels, which keeps all builds in the folder `cache`.

    A candidate is an implementation of a task's module that is to be judged. The constructor of Builder
    raises UserError if the compiler of `device` is not installed, and InfrastructureError if the project's
    own sources do not compile. The key of a build in the cache is a digest of its sources, the compiler, its
    flags, and the files of agent_workdir/ that builds use.
    """

    def __init__(self, sandbox: Sandbox, device: Device, cache: Path):
        self.sandbox = sandbox
        self.device = device
        self.cache = cache.resolve()
        self.cache.mkdir(parents=True, exist_ok=True)
        remove_stale(self.cache, CACHE_SECONDS)
        self.compiler = compiler(device)
        self.flags = kernel_flags(device)
        template = {path.name: path.read_text() for path in sorted(TEMPLATE.glob("*.[ch]*"))}
        self.toolchain_digest = digest_json(
            [
                CACHE_FORMAT,
                template,
                self.flags,
                self.compiler,
                pybind11.__version__,
                EXTENSION_SUFFIX,
                processor_features(),
            ]
        )
        self.user_folder = user_cache("binding").resolve()
        self.binding = self.user_folder / f"binding-{self.toolchain_digest[:32]}.o"
        self.is_isolated = sandbox.isolation == "bubblewrap"
        self.paths = self._paths() if self.is_isolated else isolation.HOST_PATHS
        folders = (TEMPLATE, pybind11.get_include(), sysconfig.get_path("include"))
        self.includes = [f"-I{self.paths.inside(folder)}" for folder in folders]
        self.binding_symbols = self._build_binding()
        if device == "cpu":
            self.includes.insert(0, f"-I{self.paths.inside(self._precompile_header())}")

    def build(self, files: dict[str, str]) -> BuildResult:
        """Return the library built from a candidate's files in kernels/, or the reason why there is none.

        A candidate is an implementation of a PyTorch module, to be judged. `files` are the texts of its files
        by workspace path, such as `kernels/add.cu`. What happens to a build that fails depends on the cause:

        - The compiler reports errors in the sources: the result has them in `log` and is cached, because a
          compiler gives the same result every time. If kernels/ has no source file, `log` says so.
        - The compiler, or a program that it starts, crashes: the build is tried a second time. If it fails
          again, `log` has the compiler's output. Nothing is cached.
        - The build takes longer than sandbox.build_seconds: it is tried a second time, unless the compiler
          says that its CPU time is used up. If it fails again, `timed_out` is set. Nothing is cached.
        - The machine ends the compiler, for example because memory runs out: the build is tried a second
          time. If it fails again, InfrastructureError is raised.
        - The compiler writes no library, or one whose imported symbols nm cannot list: the result says so in
          `log` and is cached.
        - The sandbox, the compiler or nm cannot be run: InfrastructureError is raised at once.
        """
        kernels = {name: text for name, text in sorted(files.items()) if name.startswith("kernels/")}
        suffixes = SOURCE_SUFFIXES[self.device]
        sources = {
            name: text for name, text in kernels.items() if name.count("/") == 1 and name.endswith(suffixes)
        }
        if not sources:
            return BuildResult(None, f"kernels/ holds no source file: write kernels/NAME{suffixes[0]}")
        headers = {name: text for name, text in kernels.items() if name.endswith(HEADER_SUFFIXES)}
        # The public workspace format includes the registry as "../binding_registry.h".
        registry = {"binding_registry.h": (TEMPLATE / "binding_registry.h").read_text()}
        command = [self.compiler, *self.flags, *self.includes, "-I{in}/kernels", "-shared"]
        command += [*(f"{{in}}/{name}" for name in sources), self.paths.inside(self.binding)]
        command += library_flags((sources | headers).values(), self.device, self.paths)
        return self._build(
            digest_json([self.toolchain_digest, sources, headers]), sources | headers | registry, command
        )

    def build_extension(self, extension: Extension) -> BuildResult:
        """Return the library of a torch extension that a candidate requests, or the reason why there is none.

        A candidate is an implementation of a PyTorch module, to be judged. `compilers.refused_flag` must
        have accepted the flags of `extension`. Failures are treated as in `build`: if the compiler reports
        errors or crashes, `log` has its output; if the time runs out, `timed_out` is set; and
        InfrastructureError is raised if the machine ends the compiler, or if the sandbox or nm cannot be run.
        """
        sources = {f"kernels/{name}": text for name, text in extension["sources"].items()}
        names = [name for name in sources if name.endswith(SOURCE_SUFFIXES[self.device])]
        command = [self.compiler, *self.flags, *self.includes, "-shared"]
        command += [f"-DTORCH_EXTENSION_NAME={extension['name']}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        command += [*extension_flags(extension, self.device), *(f"{{in}}/{name}" for name in names)]
        command += library_flags(sources.values(), self.device, self.paths)
        key = digest_json([self.toolchain_digest, extension])
        return self._build(key, sources, command)

    def _build(self, key: str, texts: Mapping[str, str], command: Sequence[str]) -> BuildResult:
        """Return the result of the build that `command` makes, or the one that the cache has for `key`.

        Failures are treated as `build` says. `texts` are the source texts by path, which are written to a
        folder first. In the words of `command`, `{in}` is replaced by the path of this folder.
        """
        stem = self.cache / key[:32]
        library, symbols, failed = (stem.with_suffix(suffix) for suffix in (".so", ".symbols", ".failed"))
        for path in (library, symbols, failed):
            with contextlib.suppress(OSError):  # the file does not exist or belongs to another user
                os.utime(path)
        if symbols.exists():
            digest, *known = symbols.read_text().split()
            content = library.read_bytes()
            if digest_bytes(content) == digest:
                return BuildResult(content, symbols=tuple(known))
        if failed.exists():
            return BuildResult(None, failed.read_text())
        with self._build_folder() as folder:
            for name, text in texts.items():
                path = folder / "in" / name
                path.write_text(text)
                path.chmod(0o644)
            inside = "/in" if self.is_isolated else str(folder / "in")
            command = [word.replace("{in}", inside) for word in command]
            for _ in range(ATTEMPTS):
                try:
                    result, names = self._compile(folder, command)
                    timed_out = result.returncode != 0 and bool(TIME_USED_UP.search(result.stderr))
                    if timed_out or not is_signalled(result):
                        break
                except subprocess.TimeoutExpired:
                    timed_out = True
            if timed_out:
                log = f"the build took longer than {self.sandbox.build_seconds:g} s"
                return BuildResult(None, log, timed_out=True)
            if result.returncode != 0:
                if not is_compiler_error(result):
                    raise InfrastructureError(
                        f"a build ended with exit code {result.returncode}: {result.stderr[-500:]}"
                    )
                log = result.stderr.replace(f"{inside}/", "").replace(f"{self.paths.inside(TEMPLATE)}/", "")
                if not is_signalled(result):
                    atomic_write(failed, log[:MAX_LOG_BYTES])
                return BuildResult(None, log[:MAX_LOG_BYTES])
            content = (folder / "out" / "library.so").read_bytes()
            atomic_write(library, content)
            # Written last, because the existence of this file shows that the library is complete.
            atomic_write(symbols, "\n".join([digest_bytes(content), *names]))
        return BuildResult(content, symbols=names)

    def _paths(self) -> isolation.PathMap:
        """Return the sandbox paths of the host folders that a compiler needs besides the sources of a build.

        These are the folders of Python, pybind11 and agent_workdir/, the user's cache, and on cuda the CUDA
        toolkit if it is not in /usr.
        """
        fixed = {
            TEMPLATE: "/template",
            self.user_folder: "/shared",
            Path(pybind11.get_include()): "/pybind11",
        }
        toolkit = Path(self.compiler).resolve().parent.parent
        if self.device == "cuda" and not toolkit.is_relative_to("/usr"):
            fixed[toolkit] = str(toolkit)
        return isolation.python_paths() | fixed

    def _build_binding(self) -> frozenset[str]:
        """Compile binding.cpp unless the cache has it, and return the names of the symbols that it imports.

        This module makes kernels callable from Python, and is linked to every build of kernels. Raises
        InfrastructureError if it does not compile, or if nm fails.
        """
        flags = ["-O1", "-fPIC", "-std=c++17", "-fvisibility=hidden", "-c"]
        flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        compile_own(TEMPLATE / "binding.cpp", self.binding, flags)
        nm = ["nm", "--undefined-only", "--format=posix", str(self.binding)]
        try:
            listed = subprocess.run(nm, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InfrastructureError(f"nm failed on {self.binding}: {error}") from error
        return frozenset(symbol_names(listed.stdout))

    def _precompile_header(self) -> Path:
        """Return a folder with binding_registry.h and its precompiled form, made if the cache has none.

        Kernels include this header. A small build takes half the time if the folder is its first include
        folder. Raises InfrastructureError if the header does not compile.
        """
        source = TEMPLATE / "binding_registry.h"
        headers = self.user_folder / f"headers-{self.toolchain_digest[:32]}"
        headers.mkdir(exist_ok=True)
        headers.chmod(0o755)
        precompiled = headers / f"{source.name}.gch"
        if not precompiled.exists():
            atomic_write(headers / source.name, source.read_text())
            compile_own(source, precompiled, [*self.flags, "-x", "c++-header"])
        return headers

    @contextlib.contextmanager
    def _build_folder(self) -> Iterator[Path]:
        """Yield a temporary folder for a build, with `in` for sources and `out` for the compiler's files.

        The folder is removed at the end of the context.
        """
        with tempfile.TemporaryDirectory(dir=self.cache, prefix="build-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for path in (folder, folder / "in", folder / "in" / "kernels", folder / "out"):
                path.mkdir(exist_ok=True)
                path.chmod(0o755)  # for compilers, which have another uid if the judge is root
            if isolation.can_change_uid():
                os.chown(folder / "out", isolation.BUILDER, isolation.BUILDER)
            yield folder

    def _compile(
        self, folder: Path, command: list[str]
    ) -> tuple[subprocess.CompletedProcess[str], tuple[str, ...]]:
        """Run a compiler that writes library.so; return the finished process and the imported symbols.

        The symbols are names, and there are none if the compiler has failed. `folder` is a build folder
        (`_build_folder`), in whose subfolder `out` the file is written. The compiler and nm run in the same
        sandbox, because starting a sandbox takes as long as a small compilation. Without isolation, both run
        outside a sandbox. The stderr of the returned process has the compiler's output. If the compiler
        writes no library, or one whose symbols nm cannot read, or that imports none, the process has failed
        with the exit code COMPILER_FAILED and an error, because the sources can cause that. Raises
        subprocess.TimeoutExpired after sandbox.build_seconds.
        """
        output = "/out/library.so" if self.is_isolated else f"{folder}/out/library.so"
        file = shlex.quote(output)
        nm = f"nm --undefined-only --format=posix -D {file}"
        # 126 and 127 mean a program that could not be started, and larger codes a signal, but 255 is the code
        # of nvcc if ptxas reports an error.
        failed = f"code=$?; test $code -lt 126 -o $code -eq 255 && exit {COMPILER_FAILED}; exit $code"
        missing = f"{{ echo 'error: the compiler wrote no library' >&2; exit {COMPILER_FAILED}; }}"
        unread = "code=$?; test $code -ge 126 && exit $code; echo 'error: nm cannot read the library' >&2"
        script = f"""
            "$@" >&2 || {{ {failed}; }}
            test -f {file} && test ! -L {file} || {missing}
            {nm} || {{ {unread}; exit {COMPILER_FAILED}; }}
        """
        command = ["/bin/sh", "-c", script, "sh", *command, "-o", output]
        environment: Mapping[str, str] = os.environ | {"TMPDIR": f"{folder}/out"}
        pass_fds: tuple[int, ...] = ()
        with contextlib.ExitStack() as stack:
            if self.is_isolated:
                confined = isolation.confined(
                    command,
                    paths=self.paths | {folder / "in": "/in"},
                    writable={"/out": folder / "out"},
                    variables={"TMPDIR": "/tmp"},
                    temporary_bytes=TEMPORARY_BYTES,
                    memory_bytes=MAX_MEMORY_BYTES,
                    file_bytes=MAX_LIBRARY_BYTES,
                    seconds=CPU_SHARE * self.sandbox.build_seconds - 1,
                )
                command, filter_fd = stack.enter_context(confined)
                environment, pass_fds = isolation.BUBBLEWRAP_ENVIRONMENT, (filter_fd,)
            # Redirect the output to files, because the limits of the command include the size of files. A
            # compiler can be made to print without end.
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[1],
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,  # the compiler's programs are killed with it, and not by a Ctrl-C
            )
            code = wait_for_exit(process, self.sandbox.build_seconds)
            out, errors = (
                os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace") for file in files
            )
        names = (TOO_MANY_SYMBOLS,) if len(out.encode()) >= MAX_OUTPUT_BYTES else symbol_names(out)
        if code == 0 and not names:
            # Every honest library imports functions of Python. Sources can hide that, by defining them.
            code = COMPILER_FAILED
            errors = f"error: the library imports no symbols, not even those of Python\n{errors}"
        return subprocess.CompletedProcess(command, code, out, errors), names
