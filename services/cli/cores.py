"""How many cores and how much memory this process may use, and how the workers share them. Decisions are pure."""

from __future__ import annotations

import os
from pathlib import Path

from shared.engine.cores import usable_cores as usable_cores
from shared.engine.free_memory import free_memory_bytes as free_memory_bytes

MIN_POOL_BYTES = 64 * 1024 * 1024
MAX_POOL_BYTES = 1024 * 1024 * 1024
POOL_SHARE = 0.25
"""Part of free memory that all KV pools together may take when their size is not set."""


def threads_per_worker(cores: int, workers: int) -> int:
    """Threads of torch in one worker: the cores split evenly, at least one each.

    Threads of all workers together do not exceed the cores, because two workers that spin on one core both lose. Native
    kernels take more while other workers rest. The numbers a worker computes do not depend on its thread count.
    """
    return max(1, cores // max(1, workers))


def has_gpu() -> bool:
    """True where an NVIDIA driver is at work; whether its GPU is one to compute on, a worker finds out."""
    return Path("/dev/nvidiactl").exists()


def pool_bytes_per_worker(free_memory: int, free_folder: int, workers: int) -> int:
    """Bytes of one worker's KV pool when none are set: a share of what is free, within bounds.

    Args:
        free_memory: bytes the machine or control group has free.
        free_folder: bytes free in the folder of the pools, which on tmpfs is memory too.
    """
    share = min(free_memory * POOL_SHARE, free_folder * 0.8) / max(1, workers)
    return int(min(MAX_POOL_BYTES, max(MIN_POOL_BYTES, share)))


def free_folder_bytes(folder: Path) -> int:
    """Bytes free on the file system of `folder`."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
