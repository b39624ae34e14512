"""Tell from the end and output of a failed build whether the sources or the machine caused the failure."""

import re
import signal
import subprocess

# Maximum output of a compiler or of nm that is read.
MAX_OUTPUT_BYTES = 1 << 20
# Exit code of the build script if the compiler ran and reported a failure.
COMPILER_FAILED = 65
# Exit codes after signals that end a compiler because of the sources: it crashed, or exceeded its own limits
# of output and CPU time.
COMPILER_CRASHED = frozenset(
    128 + number
    for number in (
        *(signal.SIGABRT, signal.SIGFPE, signal.SIGILL),
        *(signal.SIGSEGV, signal.SIGXCPU, signal.SIGXFSZ),
    )
)
# Pattern of the messages of compilers and linkers about a source.
DIAGNOSTIC = re.compile(
    r"(?i)\b(?:error|fatal)\s*(?::|#\d)|undefined reference|(?:out of memory|exhausted)\b"
)
# Pattern of whole lines with which a compiler says that the machine ended or refused one of its processes. A
# source could print such a line, but only in an error of its own, which is a further line.
MACHINE_FAULT = re.compile(
    r"\S+: (?:fatal|internal compiler) error: (?:Killed|Terminated) signal terminated program \S+"
    r"|\S+: fatal error: \S+ terminated with signal \d+ \[(?:Killed|Terminated)\].*"
    r"|\S+: fatal error: cannot execute [^:]*: \w+:"
    r" (?:Resource temporarily unavailable|Cannot allocate memory)"
    r"|nvcc error\s*: '[^']+' died due to signal (?:9|15)\b[^:]*"
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
    """Return whether a failed build ended with diagnostics of the compiler or linker about the sources.

    `result` is the ended process of the build, whose stderr has the compiler's output. The result is False if
    the sandbox could not be made, a process could not be started, or the machine ended a process. It is True
    for a compiler that printed more than is read, or that crashed, because only the sources can cause that.
    """
    lines = [line for line in result.stderr.splitlines() if not MACHINE_FAULT.fullmatch(line.strip())]
    has_diagnostics = any(map(DIAGNOSTIC.search, lines)) or len(result.stderr.encode()) >= MAX_OUTPUT_BYTES
    return result.returncode in COMPILER_CRASHED or (result.returncode == COMPILER_FAILED and has_diagnostics)


def is_signalled(result: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a signal ended a process of a failed build, so that another try may succeed.

    `result` is the ended process of the build, whose stderr has the compiler's output. A build that succeeded
    gives False.
    """
    if result.returncode == COMPILER_FAILED:
        return bool(SIGNALLED.search(result.stderr))
    return result.returncode > 128
