"""Memory that the judge and a sandboxed process share: host memory by memfd, device memory by the CUDA driver.

The only thing that crosses is a file descriptor; the layout is fixed by the judge. On cuda the driver's virtual-memory
API exports an allocation as a POSIX file descriptor, which crosses bubblewrap's namespaces (seen on an H200).
This file is imported on both sides of the sandbox and imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 256
PAGE_BYTES = 4096
STEP = 5
"""What the sets of a round lie apart in a page, in alignments: coprime to the 16 that a page has, so that they begin all over it.

A loop's time hangs on where in a page its input and its output begin: one took 134 to 154 µs or 160 to 175 on an Intel Xeon, by its output's
place. With every input at a page's beginning that was a candidate's luck, the same in every verdict of one zygote.
"""


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies: byte offset, shape, dtype name (`float32`)."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def pack_slots(specs: list[tuple[tuple[int, ...], str]]) -> tuple[list[Slot], int]:
    """Aligned slots for tensors of the given shapes and dtypes, one after the other, and the bytes from one such set to the next."""
    slots, offset = [], 0
    for shape, dtype in specs:
        slot = Slot(offset, tuple(shape), dtype)
        slots.append(slot)
        offset += -(-slot.bytes // ALIGNMENT) * ALIGNMENT
    return slots, offset + (STEP - offset // ALIGNMENT) % (PAGE_BYTES // ALIGNMENT) * ALIGNMENT


@contextlib.contextmanager
def corrupted_pages(memory: torch.Tensor) -> Iterator[None]:
    """Flip one random byte in every page of `memory` for a while.

    A result that is an input's own pages mapped to another address, and no copy of them, reads wrong then. The system draws the
    places: torch's generator starts from the same seed in every process, and a stage that trains beside the judge draws from it.
    """
    places = torch.arange(0, memory.numel(), PAGE_BYTES)
    drawn = torch.frombuffer(bytearray(os.urandom(2 * len(places))), dtype=torch.int16) & (PAGE_BYTES - 1)
    places = (places + drawn).clamp_(max=memory.numel() - 1)
    memory[places] ^= 0xFF
    try:
        yield
    finally:
        memory[places] ^= 0xFF


class HostBuffer:
    """`size` bytes of shared host memory."""

    def __init__(self, size: int, fd: int | None = None):
        self.fd = os.memfd_create("buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
            # Shortened by a runner, the file would kill the judge (SIGBUS); lengthened, it would hold what nobody counts.
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
        self.size = size
        self.map = mmap.mmap(self.fd, size)

    def tensor(self, slot: Slot) -> torch.Tensor:
        """A view of the slot; no copy."""
        count = torch.Size(slot.shape).numel()
        return torch.frombuffer(
            self.map, dtype=getattr(torch, slot.dtype), count=count, offset=slot.offset
        ).view(slot.shape)

    def raw(self) -> torch.Tensor:
        return torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last tensor that views it."""
        os.close(self.fd)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 32),
    )


class _AccessDescriptor(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


POSIX_FILE_DESCRIPTOR = 1
PINNED = 1
DEVICE = 1
READ_WRITE = 3
OUT_OF_MEMORY = 2


_here = threading.local()


def _driver() -> ctypes.CDLL:
    if not hasattr(_here, "driver"):
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the primary context current in this thread
        _here.driver = ctypes.CDLL("libcuda.so.1")
    return _here.driver


def _check(result: int, call: str) -> None:
    if result == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{call}: the device's memory is full")
    if result != 0:
        raise RuntimeError(f"{call} failed with CUDA driver error {result}")


def _wrapped(pointer: int, size: int) -> torch.Tensor:
    """Device memory as a tensor of bytes; no copy. The way by `__cuda_array_interface__` asks the driver whose pointer it is, and
    holds the interpreter's lock meanwhile: among many threads that make buffers all of them waited for that answer."""
    storage = torch._C._construct_storage_from_data_pointer(
        pointer, torch.device("cuda", torch.cuda.current_device()), size
    )
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


class DeviceBuffer:
    """`size` bytes of shared memory of the current CUDA device (CUDA driver API, section Virtual Memory Management)."""

    def __init__(self, size: int, fd: int | None = None):
        driver = _driver()
        properties = _AllocationProperties(
            type=PINNED,
            requested_handle_types=POSIX_FILE_DESCRIPTOR,
            location=_Location(DEVICE, torch.cuda.current_device()),
        )
        granularity = ctypes.c_size_t()
        _check(
            driver.cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(properties), 0),
            "cuMemGetAllocationGranularity",
        )
        self.size = -(-size // granularity.value) * granularity.value
        handle = ctypes.c_ulonglong()
        if fd is None:
            wanted = (
                ctypes.byref(handle),
                ctypes.c_size_t(self.size),
                ctypes.byref(properties),
                ctypes.c_ulonglong(0),
            )
            if (result := driver.cuMemCreate(*wanted)) == OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # which the driver does not know to be free
                result = driver.cuMemCreate(*wanted)
            _check(result, "cuMemCreate")
            exported = ctypes.c_int()
            _check(
                driver.cuMemExportToShareableHandle(
                    ctypes.byref(exported), handle, POSIX_FILE_DESCRIPTOR, ctypes.c_ulonglong(0)
                ),
                "cuMemExportToShareableHandle",
            )
            self.fd = exported.value
        else:
            _check(
                driver.cuMemImportFromShareableHandle(
                    ctypes.byref(handle), ctypes.c_void_p(fd), POSIX_FILE_DESCRIPTOR
                ),
                "cuMemImportFromShareableHandle",
            )
            self.fd = fd
        pointer = ctypes.c_ulonglong()
        zero = ctypes.c_ulonglong(0)
        _check(
            driver.cuMemAddressReserve(
                ctypes.byref(pointer), ctypes.c_size_t(self.size), ctypes.c_size_t(0), zero, zero
            ),
            "cuMemAddressReserve",
        )
        _check(
            driver.cuMemMap(pointer, ctypes.c_size_t(self.size), ctypes.c_size_t(0), handle, zero), "cuMemMap"
        )
        access = _AccessDescriptor(_Location(DEVICE, torch.cuda.current_device()), READ_WRITE)
        _check(
            driver.cuMemSetAccess(
                pointer, ctypes.c_size_t(self.size), ctypes.byref(access), ctypes.c_size_t(1)
            ),
            "cuMemSetAccess",
        )
        _check(driver.cuMemRelease(handle), "cuMemRelease")
        self._pointer = pointer
        self._driver = driver
        self._bytes: torch.Tensor | None = _wrapped(pointer.value, self.size)

    def tensor(self, slot: Slot) -> torch.Tensor:
        return (
            self.raw()[slot.offset : slot.offset + slot.bytes]
            .view(getattr(torch, slot.dtype))
            .view(slot.shape)
        )

    def raw(self) -> torch.Tensor:
        assert self._bytes is not None, "the buffer is closed"
        return self._bytes

    def close(self) -> None:
        """Unmap and free; no view may be used afterwards."""
        torch.cuda.synchronize()
        self._bytes = None
        self._driver.cuMemUnmap(self._pointer, ctypes.c_size_t(self.size))
        self._driver.cuMemAddressFree(self._pointer, ctypes.c_size_t(self.size))
        os.close(self.fd)


Buffer = HostBuffer | DeviceBuffer


def make_buffer(device: str, size: int, fd: int | None = None) -> Any:
    """A new shared buffer on `device`, or the mapping of one received as `fd`."""
    return (DeviceBuffer if device == "cuda" else HostBuffer)(size, fd)
