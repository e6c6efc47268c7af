"""Leases in NATS KV: one key a lease, expiring by the server's own clock.

The term is the revision at which the present owner took the lease. Revisions of a stream only grow, so a later owner
always has a higher term; renewals keep it. A bucket that is made anew, since NATS lost its store, begins at a revision
above those of any before it: at the wall clock's time, which grows faster than leases are written.
"""

from __future__ import annotations

import math
import time

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from shared.bus.streams import LEASE_BUCKET

_WRONG_LAST_SEQUENCE = (10071, 10164)
_NAME_IN_USE = 10058
REVISIONS_S = 10
"""Revisions a second that a bucket's life may use up: a pool writes its lease every few seconds."""


class LeaseEntry(msgspec.Struct, frozen=True):
    """The value under a lease's key. `term` 0 stands for the revision of this very entry."""

    owner: str
    term: int = 0


class LeaseBucket:
    """The KV bucket of all leases; made on first use."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js
        self._made = False

    async def acquire(self, name: str, owner: str, ttl_s: float) -> int | None:
        """Take or renew; the term, or None while another owner holds it or won the race."""
        try:
            return await self._acquire(name, owner, ttl_s)
        except nats.errors.Error:
            self._made = False  # it may be gone, with all that the server had stored
            raise

    async def _acquire(self, name: str, owner: str, ttl_s: float) -> int | None:
        await self._make()
        revision, entry = await self._read(name)
        if entry is not None and entry.owner != owner:
            return None
        term = (entry.term or revision) if entry is not None else 0
        ttl = max(1, math.ceil(ttl_s))
        written = await self._write(
            name, msgspec.json.encode(LeaseEntry(owner, term)), revision, {"Nats-TTL": str(ttl)}
        )
        return None if written is None else term or written

    async def release(self, name: str, owner: str) -> None:
        """Put a delete marker in place of the entry, unless another owner has it."""
        await self._make()
        revision, entry = await self._read(name)
        if entry is not None and entry.owner == owner:
            await self._write(name, b"", revision, {"KV-Operation": "DEL"})

    async def _read(self, name: str) -> tuple[int, LeaseEntry | None]:
        """(last revision of the key, its entry); the entry is None when absent, expired or released."""
        try:
            found = await self._js.get_msg(f"KV_{LEASE_BUCKET}", subject=f"$KV.{LEASE_BUCKET}.{name}", direct=True)
        except nats.js.errors.NotFoundError:
            return 0, None
        if not found.data or (found.headers or {}).get("KV-Operation"):
            return found.seq or 0, None
        return found.seq or 0, msgspec.json.decode(found.data, type=LeaseEntry)

    async def _write(self, name: str, value: bytes, last: int, headers: dict[str, str]) -> int | None:
        try:
            ack = await self._js.publish(
                f"$KV.{LEASE_BUCKET}.{name}",
                value,
                headers={**headers, "Nats-Expected-Last-Subject-Sequence": str(last)},
            )
        except nats.js.errors.APIError as exc:
            if exc.err_code in _WRONG_LAST_SEQUENCE:
                return None
            raise
        return ack.seq

    async def _make(self) -> None:
        if self._made:
            return
        config = StreamConfig(
            name=f"KV_{LEASE_BUCKET}",
            subjects=[f"$KV.{LEASE_BUCKET}.>"],
            max_msgs_per_subject=1,
            max_bytes=1024 * 1024,
            allow_direct=True,
            allow_rollup_hdrs=True,
            allow_msg_ttl=True,
            deny_delete=True,
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            first_seq=int(time.time() * REVISIONS_S),
        )
        try:
            await self._js.add_stream(config)
        except nats.js.errors.BadRequestError as exc:
            # Made earlier with other limits: as good.
            if exc.err_code != _NAME_IN_USE:
                raise
        self._made = True
