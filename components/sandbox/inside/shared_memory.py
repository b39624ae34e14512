"""Memory that the judge shares with a sandboxed process: host memory from memfd, or device memory of CUDA.

The judge makes a buffer, determines its layout and sends a file descriptor of the buffer into the sandbox.
For device memory, the virtual-memory API of the CUDA driver exports an allocation as a POSIX file descriptor.
The judge and the code inside the sandbox import this file. It imports nothing of the project.
"""

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

# Alignment of every tensor, in bytes.
ALIGNMENT = 256
PAGE_BYTES = 4096
# Distance between the offsets in a page at which successive input sets begin, in units of ALIGNMENT. The
# speed of a loop depends on the offsets in a page at which its input and output begin. PAGE_STEP and the 16
# possible offsets of a page have no common divisor, so that the input sets of a round begin at all offsets
# and a candidate cannot always have the best one.
PAGE_STEP = 5


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in a buffer: offset in bytes, shape, and dtype name such as `float32`."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        item_bytes: int = getattr(torch, self.dtype).itemsize
        return torch.Size(self.shape).numel() * item_bytes


def pack_slots(forms: list[tuple[tuple[int, ...], str]]) -> tuple[list[Slot], int]:
    """Return aligned slots for the tensors of one input set, and the bytes from one input set to the next.

    An input set is the tensors of one call, and a slot the place of one tensor in a buffer. `forms` has the
    shape and the dtype's name of each tensor.
    """
    slots, offset = [], 0
    for shape, dtype in forms:
        slots.append(Slot(offset, tuple(shape), dtype))
        offset += -(-slots[-1].bytes // ALIGNMENT) * ALIGNMENT
    return slots, offset + (PAGE_STEP - offset // ALIGNMENT) % (PAGE_BYTES // ALIGNMENT) * ALIGNMENT


@contextlib.contextmanager
def corrupted_pages(memory: torch.Tensor) -> Iterator[None]:
    """Return a context in which one random byte in every page of `memory` (uint8) is inverted.

    It is for the memory with the inputs of a call: a process that returns these pages as its result, mapped
    to another address instead of copied, then returns a wrong result. The positions come from os.urandom,
    because torch's generator would give predictable positions and would disturb the random numbers of
    training in this process.
    """
    pages = torch.arange(0, memory.numel(), PAGE_BYTES)
    offsets = torch.frombuffer(bytearray(os.urandom(2 * len(pages))), dtype=torch.int16) & (PAGE_BYTES - 1)
    positions = (pages + offsets).clamp_(max=memory.numel() - 1)
    memory[positions] ^= 0xFF
    try:
        yield
    finally:
        memory[positions] ^= 0xFF


class HostBuffer:
    """Buffer of `size` bytes of shared host memory: new, or the existing one with the descriptor `fd`."""

    device: Literal["cpu"] = "cpu"

    def __init__(self, size: int, fd: int | None = None):
        self.fd = os.memfd_create("buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
            # If a runner could shorten the file, SIGBUS would end the judge. If it could lengthen the file,
            # it would get memory that no limit includes.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.size = size
        self.map = mmap.mmap(self.fd, size)

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return the tensor at the place `slot`, as a view of the buffer."""
        count, dtype = torch.Size(slot.shape).numel(), getattr(torch, slot.dtype)
        if count == 0:
            return torch.empty(slot.shape, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=slot.offset).view(slot.shape)

    def raw(self) -> torch.Tensor:
        """Return all bytes of the buffer as a uint8 tensor, without copying them."""
        return torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; the memory is freed when the buffer and its tensors are deleted."""
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


# Values of cuda.h: CU_MEM_HANDLE_TYPE_, CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_,
# CU_MEM_ACCESS_FLAGS_PROT_, CUDA_ERROR_.
POSIX_FILE_DESCRIPTOR, PINNED, DEVICE, READ_WRITE, OUT_OF_MEMORY = 1, 1, 1, 3, 2
LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call the function `name` of the CUDA driver API with `arguments`.

    Raises torch.OutOfMemoryError if the device's memory is full, and RuntimeError if the call fails
    otherwise.
    """
    result = getattr(_driver(), name)(*arguments)
    if result == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device's memory is full")
    if result != 0:
        raise RuntimeError(f"{name} failed with CUDA driver error {result}")


def is_cuda_malloc(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory of cudaMalloc, as all memory of torch's allocator does.

    A tensor in memory of the CUDA driver's virtual memory management (cuMemCreate and cuMemMap) does not. The
    driver is asked for the attribute IS_LEGACY_CUDA_IPC_CAPABLE, which only memory of cudaMalloc has. The
    result is True for a tensor without elements, and False for any other tensor that is not on cuda.
    """
    if tensor.numel() == 0 or not tensor.is_cuda:
        return tensor.numel() == 0
    is_ipc_capable = ctypes.c_ulonglong(0)
    address = ctypes.c_ulonglong(tensor.data_ptr())
    _call("cuPointerGetAttribute", ctypes.byref(is_ipc_capable), LEGACY_IPC_CAPABLE, address)
    return bool(is_ipc_capable.value & 0xFF)


class DeviceBuffer:
    """Buffer of shared memory on the current CUDA device: a new one, or the one with the descriptor `fd`.

    A new one is made if `fd` is None. `size` is in bytes and is rounded up to the granularity of the driver's
    allocations. The buffer uses the functions of the CUDA driver API in the section Virtual Memory
    Management. Raises torch.OutOfMemoryError if the device's memory is full, and RuntimeError if a call of
    the driver fails otherwise.
    """

    device: Literal["cuda"] = "cuda"

    def __init__(self, size: int, fd: int | None = None):
        torch.zeros(1, device="cuda")  # initialises CUDA and makes the primary context current in this thread
        device = torch.cuda.current_device()
        location = _Location(DEVICE, device)
        properties = ctypes.byref(
            _AllocationProperties(
                type=PINNED, requested_handle_types=POSIX_FILE_DESCRIPTOR, location=location
            )
        )
        granularity, handle, exported = ctypes.c_size_t(), ctypes.c_ulonglong(), ctypes.c_int()
        self._pointer, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), properties, 0)
        self.size = -(-size // granularity.value) * granularity.value
        self._size = ctypes.c_size_t(self.size)
        if fd is None:
            try:
                _call("cuMemCreate", ctypes.byref(handle), self._size, properties, zero)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # give memory that torch's allocator keeps back to the driver
                _call("cuMemCreate", ctypes.byref(handle), self._size, properties, zero)
            _call("cuMemExportToShareableHandle", ctypes.byref(exported), handle, POSIX_FILE_DESCRIPTOR, zero)
            self.fd = exported.value
        else:
            descriptor = ctypes.c_void_p(fd)
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, POSIX_FILE_DESCRIPTOR)
            self.fd = fd
        _call("cuMemAddressReserve", ctypes.byref(self._pointer), self._size, ctypes.c_size_t(0), zero, zero)
        _call("cuMemMap", self._pointer, self._size, ctypes.c_size_t(0), handle, zero)
        access = ctypes.byref(_AccessDescriptor(location, READ_WRITE))
        _call("cuMemSetAccess", self._pointer, self._size, access, ctypes.c_size_t(1))
        _call("cuMemRelease", handle)
        # `__cuda_array_interface__` is not used, because it calls the driver while it holds the interpreter's
        # lock.
        storage = torch._C._construct_storage_from_data_pointer(
            self._pointer.value, torch.device("cuda", device), self.size
        )
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return the tensor at the place `slot`, as a view of the buffer."""
        values = self.raw()[slot.offset : slot.offset + slot.bytes]
        return values.view(getattr(torch, slot.dtype)).view(slot.shape)

    def raw(self) -> torch.Tensor:
        """Return all bytes of the buffer as a uint8 tensor, without copying them."""
        return self._bytes

    def close(self) -> None:
        """Unmap the memory and close the descriptor; no tensor of the buffer may be used afterwards."""
        torch.cuda.synchronize()
        del self._bytes
        _driver().cuMemUnmap(self._pointer, self._size)
        _driver().cuMemAddressFree(self._pointer, self._size)
        os.close(self.fd)


Buffer = HostBuffer | DeviceBuffer


def make_buffer(device: str, size: int, fd: int | None = None) -> Buffer:
    """Return a new shared buffer of `size` bytes on `device`, or the existing buffer received as `fd`."""
    return (DeviceBuffer if device == "cuda" else HostBuffer)(size, fd)
