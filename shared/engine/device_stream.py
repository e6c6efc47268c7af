"""Launching work on a device and waiting for it elsewhere. On a CPU everything has happened when a launch returns."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a stream's order."""

    def wait(self) -> None:
        """Until everything launched before the mark has ended."""


class DeviceStream:
    """One order of launches on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[object]:
        """Launches inside go to this stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def host_buffer(self, words: int) -> Tensor:
        """[words] int32 on the host, which the device may read and write while the host goes on."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=self._stream is not None)

    def upload(self, words: npt.NDArray[np.int32]) -> Tensor:
        """The words on the device, for what is launched on this stream from now on. The host goes on at once."""
        host = torch.from_numpy(words)
        if self._stream is None:
            return host
        # the allocator of pinned memory gives it to nobody else until the copy has ended
        return host.pin_memory().to(self.device, non_blocking=True)

    def mark(self) -> Mark:
        """The stream's end as it is now."""
        return _Nothing() if self._stream is None else _Event(self._stream)

    def answers(self) -> bool:
        """Waits for all that was launched; False where the device has failed."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class _Nothing:
    def wait(self) -> None:
        """There is nothing to wait for."""


class _Event:
    def __init__(self, stream: Any) -> None:
        # blocking: the waiting thread sleeps, and leaves its core to the one that launches
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()
