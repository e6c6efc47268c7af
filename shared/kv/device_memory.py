"""Memory of an NVIDIA GPU that no allocator of torch owns: one plain allocation, which other processes may map.

Calls the driver's own library (CUDA driver API, "Memory Management"); every process with a GPU has it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from shared.contracts.errors import Internal, Unavailable

HANDLE_BYTES = 64
PAGE_BYTES = 2 * 1024 * 1024
"""What the driver gives memory by. A smaller allocation may share its page with others, and its handle would open those
to whoever maps it ("cudaIpcGetMemHandle" in the CUDA runtime API)."""
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class OutOfDeviceMemory(Internal):
    """The device has no such room."""


class DeviceMemory:
    """Bytes on a device: allocated here, or another process's, mapped.

    `close` gives them back; tensors over them must be gone by then.
    """

    def __init__(self, address: int, size: int, device: torch.device, mapped: bool) -> None:
        self.size = size
        self._address = address
        self._device = device
        self._mapped = mapped

    def tensor(self) -> Tensor:
        """All bytes: [size] uint8."""
        return torch.as_tensor(_Array(self._address, self.size), device=self._device)

    def handle(self) -> bytes:
        """What another process maps these bytes by."""
        handle = _IpcHandle()
        with torch.cuda.device(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        return bytes(handle)

    def close(self) -> None:
        """Free or unmap. Idempotent."""
        if not self._address:
            return
        address, self._address = self._address, 0
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _call("cuIpcCloseMemHandle" if self._mapped else "cuMemFree_v2", ctypes.c_uint64(address))


class _Array:
    """Memory as torch takes it over without a copy (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def allocate(size: int, device: torch.device) -> DeviceMemory:
    """Allocate `size` bytes, zeroed, on pages of their own.

    Raises:
        OutOfDeviceMemory: there is no such room.
    """
    pointer = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context current
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(-(-size // PAGE_BYTES) * PAGE_BYTES))
    memory = DeviceMemory(pointer.value, size, device, mapped=False)
    memory.tensor().zero_()
    torch.cuda.synchronize(device)  # streams that use it wait for no other
    return memory


def map_peer(handle: bytes, size: int, device: torch.device) -> DeviceMemory:
    """Map another process's allocation on the same device, of which this is the handle.

    Raises:
        Unavailable: it cannot be mapped; its owner may be gone.
    """
    pointer = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        try:
            _call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                _IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        except Internal as exc:
            raise Unavailable(f"a peer's GPU memory cannot be mapped: {exc.message}") from exc
    return DeviceMemory(pointer.value, size, device, mapped=True)


def _call(name: str, *arguments: Any) -> None:
    try:
        code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    except OSError as exc:
        raise Internal(f"the GPU driver's library cannot be loaded: {exc}") from exc
    if code == _OUT_OF_MEMORY:
        raise OutOfDeviceMemory("the GPU has no room for the allocation")
    if code:
        raise Internal(f"{name} failed with CUDA error {code}")
