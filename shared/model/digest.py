"""Which model a folder holds: a digest of its configuration and weights. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import xxhash

from shared.model.checkpoint import broken
from shared.model.folder import weight_files

_CHUNK_BYTES = 1 << 24


def model_digest(folder: Path) -> str:
    """XXH3-128 (32 hex digits) over the configuration and all weight bytes: what makes two models the same model."""
    stamps = []
    for path in [folder / "config.json", *weight_files(folder)]:
        try:
            status = path.stat()
        except OSError as exc:
            raise broken(path, exc) from exc
        stamps.append((path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return _digest_of(tuple(stamps))


@lru_cache(maxsize=16)
def _digest_of(stamps: tuple[tuple[Path, int, int, int, int, int], ...]) -> str:
    """Read once a process, as long as the files' stamps stay."""
    digest = xxhash.xxh3_128()
    for path, _, _, size, *_ in stamps:
        digest.update(f"{path.name}\x00{size}\x00".encode())
        try:
            for chunk in _chunks(path):
                digest.update(chunk)
        except OSError as exc:
            raise broken(path, exc) from exc
    return str(digest.hexdigest())


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            yield view[:size]
