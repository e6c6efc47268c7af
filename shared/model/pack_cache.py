"""Packed weights kept on disk: packed once a machine, mapped and shared by all its workers.

    <folder>/lock                       one packer at a time; the others wait
    <folder>/<weights>-<version>.pack   see shared/model/pack_file.py; version: of what packs

What cannot be kept is packed in each worker's own memory: slower to start, and it takes more of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.native.arena import Arena
from kernels.native.build import KERNELS, source_digest
from shared.engine.free_memory import free_memory_bytes
from shared.model.pack_file import TEMP_PREFIX, Damaged, in_use, open_pack, write_pack
from shared.model.room import require_room, too_large

log = logging.getLogger(__name__)

PACKERS = (
    *(KERNELS / name for name in ("native/abi.py", "native/arena.py", "native/packed.py", "linear/quantize.py")),
    *(
        Path(__file__).with_name(name)
        for name in ("kept_quant.py", "native_decoder.py", "pack_file.py", "packing.py", "unpack.py", "weights.py")
    ),
)
"""Python that decides what a pack holds; the C sources count too."""
LEAST_BYTES = 16 * 1024 * 1024
"""Less than this is packed sooner than read."""
KEEP_DAYS = 30.0
KEEP_BYTES = 16 * 1024**3
"""Packs nobody uses stay so long, and while they take no more together; those used last stay longest. Those of the same
weights by another version go at once."""
FREE_SHARE = 0.25
"""Most of the memory that is free that one worker takes for a copy of packed weights."""
_DAY_S = 86400.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


@cache
def packing_digest() -> str:
    """Id of everything that decides how weights are packed, as it was at the process's first look."""
    digest = hashlib.blake2b(source_digest().encode(), digest_size=8)
    for path in PACKERS:
        digest.update(b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PackCache:
    """A folder of packs. Nothing of it raises for what is wrong with the folder: that costs a line and memory."""

    folder: Path
    least_bytes: int = LEAST_BYTES

    def arena(
        self, what: Mapping[str, str], version: str, plan: Arena, fill: Callable[[Arena], object]
    ) -> Arena | None:
        """The packed weights, to be laid out again; packed by `fill` if they are not kept yet.

        Args:
            what: all that decides their bytes, by name, but for how they are packed.
            version: of how they are packed.
            plan: of their pieces.
            fill: lays them out in an arena that is not filled. What it raises goes through.

        Returns:
            A filled arena; or None where none can be kept, or these are not worth it: nothing was packed then.

        Raises:
            SettingsError: the weights do not fit into memory.
        """
        if plan.used < self.least_bytes:
            return None
        try:
            self._require_private()
            path, head = self.folder / f"{_key(what)}-{version}.pack", {**what, "version": version}
            found = _open(path, head, plan, tell=False)
            return found or self._packed(path, head, plan, fill)
        except OSError as exc:
            self._tell(exc)
            return None

    def _packed(self, path: Path, what: Mapping[str, str], plan: Arena, fill: Callable[[Arena], object]) -> Arena:
        with self._one_at_a_time():
            if found := _open(path, what, plan, tell=True):
                return found
            for left in self.folder.glob(f"{TEMP_PREFIX}*"):  # of a packer that was killed: we hold the lock
                left.unlink(missing_ok=True)
            log.info("packing weights, once: %d MB, to be kept in %s", plan.used // 10**6, self.folder)
            arena = new_arena(plan.used)
            fill(arena)
            try:
                self._write(path, what, arena)
            except OSError as exc:
                self._tell(exc)
                return arena.again()
            self.prune(keep=path)
        return _open(path, what, plan, tell=True) or arena.again()

    def _write(self, path: Path, what: Mapping[str, str], arena: Arena) -> None:
        try:
            write_pack(path, what, arena)
        except OSError as exc:
            if exc.errno not in _FULL or not self.prune(keep=path, keep_bytes=0):
                raise
            write_pack(path, what, arena)

    def prune(self, keep: Path, keep_bytes: int = KEEP_BYTES, keep_days: float = KEEP_DAYS) -> int:
        """Remove packs that nobody uses and nobody will miss, but not `keep`, the newest. Returns how many went."""
        removed, total, now = 0, 0, time.time()
        for path, status in sorted(_packs(self.folder), key=lambda entry: -entry[1].st_mtime):
            if path == keep:
                continue
            with suppress(OSError):
                if in_use(path):
                    continue
                total += status.st_size
                old = now - status.st_mtime > keep_days * _DAY_S
                if old or total > keep_bytes or _weights(path) == _weights(keep):
                    path.unlink()
                    removed += 1
        return removed

    def _require_private(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(errno.EPERM, "the folder is others' or can be written by them")

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process that packs weights")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _tell(self, exc: OSError) -> None:
        said = exc.strerror or exc
        log.warning("cannot keep packed weights in %s: %s; this worker packs its own in memory", self.folder, said)


def new_arena(size: int) -> Arena:
    """An arena to pack weights in. Raises SettingsError where they do not fit into memory."""
    require_room(size)
    try:
        return Arena(size)
    except OSError as exc:  # the system counts otherwise than we do
        raise too_large(size, free_memory_bytes()) from exc


def in_huge_pages(arena: Arena, size: int) -> Arena:
    """The first `size` bytes of a filled arena, in huge pages where it can be.

    Without them weights are read a third more slowly on some machines, and few file systems have them: then memory of
    this process's own is taken that has, unless too little is free.
    """
    if arena.is_huge(size):
        return arena
    if size > FREE_SHARE * free_memory_bytes():
        log.warning("packed weights lie in small pages, and there is too little memory for a copy in huge ones")
        return arena
    try:
        copy = arena.copied(size)
    except OSError:  # the system gives no more than there is
        return arena
    if not copy.is_huge(size):  # the machine has none
        return arena
    log.info("packed weights are copied into huge pages, which the file system of their folder does not have")
    return copy


def _open(path: Path, what: Mapping[str, str], plan: Arena, tell: bool) -> Arena | None:
    """As `open_pack`, and None for a damaged file, with a line about it."""
    try:
        return open_pack(path, what, plan)
    except Damaged as exc:
        if tell:
            log.warning("the packed weights at %s are of no use, %s: they are packed again", path, exc)
        return None


def _packs(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob("*.pack"):
        with suppress(OSError):
            yield path, path.stat()


def _weights(path: Path) -> str:
    return path.stem.partition("-")[0]


def _key(what: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(dict(what), sort_keys=True).encode(), digest_size=16).hexdigest()
