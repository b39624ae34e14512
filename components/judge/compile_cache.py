"""Cache of what torch.compile makes of each task: compiled kernels, results of autotuning, times by mode.

A task is a PyTorch module that is to be made faster. The times by mode (seconds per call by mode of
torch.compile, as JSON) are the judge's own. Any other entry is an archive that a process with torch.compile
wrote inside the sandbox (sandbox/inside/inductor.py). The task's source ran in that process, so the archive
is untrusted: the judge never opens it, and sends it only to later processes that compile the same task in the
same mode. No sandbox contains the cache's folder.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from components.core.errors import TaskError
from components.core.files import atomic_write, digest_bytes, digest_json, remove_stale, user_cache
from components.core.records import Device
from components.judge.memory_plan import CONTEXT_BYTES
from components.judge.task_reference import TaskReference
from components.judge.timed_runner import BASELINE_LIMITS, TimedRunner
from components.sandbox.compilers import compiler, processor_features
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_factory import CACHE_SECONDS
from components.sandbox.runner_process import RunnerError

# Number that is part of every key. Increase it if the format of the entries changes.
FORMAT = 1
# Largest size of an archive that is kept.
MAX_ENTRY_BYTES = 128 << 20
# Largest size of all entries together; the least recently used ones are removed.
MAX_BYTES = 8 << 30
# Least share of the device's memory that a task takes to be compiled before its data are made.
LARGE_SHARE = 0.1
# File with the version of NVIDIA's driver, which torch does not report.
DRIVER = Path("/proc/driver/nvidia/version")


@functools.cache
def installation(device: Device) -> tuple[str, ...]:
    """Return texts that name the versions and hardware on which compiled kernels and autotuning depend.

    They name torch, Triton (or "" if it is not installed), Python, the compiler and the features of the
    processor, and on cuda also the GPU and the driver.
    """
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    host = (torch.__version__, triton, sys.version, os.path.realpath(compiler("cpu")), processor_features())
    if device == "cpu":
        return host
    return (*host, torch.cuda.get_device_name(), DRIVER.read_text() if DRIVER.exists() else "")


def entry_key(reference: TaskReference, mode: str) -> str:
    """Return the key, which is also the file name, of a task's cache entry for `mode`.

    `reference` has the task's source and the judge's settings. `mode` is a mode of torch.compile. For the
    entry that has the seconds per call of several modes, it is the text `seconds of` with the names of these
    modes.
    """
    params, task = reference.params, digest_bytes(reference.code.encode())
    return digest_json([FORMAT, task, mode, params.precision, *installation(params.device)])


@dataclass(frozen=True)
class CompileCache:
    """Folder with what torch.compile made of tasks (PyTorch modules): entries, each in a file of its own.

    A file begins with the SHA-256 of the entry's content. Several judges may use the folder at the same time,
    because each file is written atomically. All entries together have at most `max_bytes` bytes.
    """

    folder: Path
    max_bytes: int = MAX_BYTES

    def load(self, key: str) -> bytes:
        """Return the content of the entry with this key, or b"" if there is none or it is damaged.

        A damaged entry is removed.
        """
        path = self.folder / key
        try:
            content = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return b""
        digest, archive = content[:32], content[32:]
        if hashlib.sha256(archive).digest() == digest:
            return archive
        self.remove(key)
        return b""

    def store(self, key: str, archive: bytes) -> None:
        """Add or replace the entry with this key, whose content is `archive`, and remove old entries.

        An entry is old if it was not used for `CACHE_SECONDS`. The least recently used entries are also old
        while all together have more than `max_bytes` bytes.
        """
        atomic_write(self.folder / key, hashlib.sha256(archive).digest() + archive)
        remove_stale(self.folder, CACHE_SECONDS)
        total, found = 0, list[tuple[float, int, Path]]()
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another judge may have removed it
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > self.max_bytes:
                path.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        (self.folder / key).unlink(missing_ok=True)


def open_cache() -> CompileCache:
    """Return the cache of what torch.compile made, whose folder no other user of the machine may read.

    The folder is `compile` in this user's cache, which is ~/.cache/cuda-agent by default.
    """
    folder = user_cache("compile")
    folder.chmod(0o700)
    return CompileCache(folder)


def has_artefacts(reference: TaskReference, mode: str) -> bool:
    """Return whether the cache has what torch.compile made of a task in `mode`.

    `reference` has the task's source.
    """
    return (open_cache().folder / entry_key(reference, mode)).is_file()


def compile_large(reference: TaskReference) -> None:
    """Have a large task compiled by torch.compile in its default mode, and store the result in the cache.

    Call this before the memory for the data of the task is reserved, of which compiling takes only a part:
    other tasks are judged in the rest meanwhile. `reference` has the task's source. Nothing is done on cpu,
    for a task that takes less than `LARGE_SHARE` of the device, or if the cache has the result. A failure is
    ignored, because it occurs again when a candidate is compared with torch.compile.
    """
    scheduler, layout, mode = reference.scheduler, reference.layout, "default"
    least = LARGE_SHARE * scheduler.reservable_bytes
    if not 0 < least <= reference.bytes or has_artefacts(reference, mode):
        return
    header: RoleHeader = {
        "role": "compile_only",
        "code": reference.code,
        "precision": reference.params.precision,
        "init_inputs": layout.description.init_inputs,
        "construction_seed": None,
        "compile_mode": mode,
    }
    seconds = BASELINE_LIMITS * reference.params.sandbox.run_seconds
    needed = min(CONTEXT_BYTES + 2 * layout.description.peak_bytes, reference.bytes)
    with (
        scheduler.reserve_memory(needed),
        os.fdopen(os.memfd_create("artefacts"), "rb") as file,
        contextlib.suppress(RunnerError),
        contextlib.ExitStack() as cleanup,
    ):
        runner = reference.processes.start(header, (file.fileno(),), seconds=seconds)
        # The reservation must not end before the process, which has the memory.
        cleanup.callback(runner.close, wait=True)
        with scheduler.background_work(runner):
            runner.receive()
        if 0 < os.fstat(file.fileno()).st_size <= MAX_ENTRY_BYTES:
            open_cache().store(entry_key(reference, mode), os.pread(file.fileno(), MAX_ENTRY_BYTES, 0))


def load_mode_seconds(reference: TaskReference, modes: Sequence[str]) -> dict[str, float]:
    """Return the seconds of one call of the task by mode, as stored when exactly these modes were compared.

    `reference` has the task's source. The keys are names of torch.compile's modes. The result is empty if
    nothing is stored.
    """
    content = open_cache().load(_modes_key(reference, modes))
    return TypeAdapter(dict[str, float]).validate_json(content) if content else {}


def store_mode_seconds(reference: TaskReference, modes: Sequence[str], seconds: Mapping[str, float]) -> None:
    """Store the seconds of one call of the task by mode, which were measured when `modes` were compared.

    `reference` has the task's source, and the keys of `seconds` are names of torch.compile's modes.
    """
    open_cache().store(_modes_key(reference, modes), json.dumps(seconds).encode())


def _modes_key(reference: TaskReference, modes: Sequence[str]) -> str:
    return entry_key(reference, "seconds of " + " ".join(modes))


def start_compiled(
    reference: TaskReference, mode: str, start: Callable[[int], TimedRunner], *, save_seconds: float
) -> TimedRunner:
    """Return a timed runner of torch.compile in `mode`, which compiles only what the cache does not have.

    A timed runner is a sandboxed process whose calls are timed, and `reference` has the task that it
    compiles. `start` starts the runner and verifies its outputs. The argument of `start` is the descriptor of
    a file with the archive from the cache; the file is empty if the cache has none. What the runner compiles
    anew is stored after its outputs have been verified. If a runner that was given an archive fails, the
    entry is removed from the cache, and another runner is started without it. `save_seconds` is the wall time
    that the runner has to write the archive of what it compiled. Raises TaskError if the runner fails.
    """
    cache, key = open_cache(), entry_key(reference, mode)
    if archive := cache.load(key):
        try:
            return _start(cache, key, archive, start, save_seconds)
        except TaskError:
            cache.remove(key)
    return _start(cache, key, b"", start, save_seconds)


def _start(
    cache: CompileCache, key: str, archive: bytes, start: Callable[[int], TimedRunner], save_seconds: float
) -> TimedRunner:
    """Return a runner of torch.compile that `start` has started with `archive`, which may be empty.

    A runner is a sandboxed process, and an archive has what an earlier one compiled. If the runner compiles
    anything anew, its new archive is stored under `key`, unless the archive is larger than `MAX_ENTRY_BYTES`.
    Raises TaskError if the runner fails, or does not write its archive in `save_seconds` of wall time.
    """
    with os.fdopen(os.memfd_create("artefacts"), "r+b", buffering=0) as file:
        file.write(archive)
        runner = start(file.fileno())
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(runner.close)
            file.truncate(0)  # frees the memory, although the runner has a descriptor of the file
            try:
                runner.work_untimed("save", save_seconds)
            except RunnerError as error:
                raise TaskError(f"compile: {error}") from error
            size = os.fstat(file.fileno()).st_size
            if 0 < size <= MAX_ENTRY_BYTES:
                cache.store(key, os.pread(file.fileno(), size, 0))
            file.truncate(0)
            runner.is_cached = bool(archive) and size == 0
            on_failure.pop_all()
    return runner
