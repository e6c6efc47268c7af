"""Records of Idempotency-Keys in Redis, sealed; each change is one Lua script."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.contracts import idempotency_messages as i
from shared.contracts.errors import BatonError, Conflict, NotFound, OtherBody, ProtocolError, QuotaExceeded
from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.security.keeping import kept_s
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer

MAX_RECORDS = 10_000
"""Records a tenant may have at the same time."""
MAX_KEPT_BYTES = 512 * 1024 * 1024
"""Of a tenant's answers, as they are stored. One that would be over it is not kept: a retry runs it again."""
_TAKEN_OVER, _GAP, _GONE, _SHALL_END = 0, -1, -2, 2
FULL_RETRY_S = 60.0
_HANDLE_HEX, _LIFE_HEX = 20, 12
"""Digits of a request id that name the record, and those that tell its lives apart."""
PARTS_AT_ONCE = 8
"""Parts in one answer, of at most `MAX_PART_BYTES` each."""
MAX_PART_BYTES = 256 * 1024
_REPLY_FIELDS = 8

_LUA = Path(__file__).with_name("lua")
_KEPT, *_PARTS = ((_LUA / f"idempotency_{name}.lua").read_text() for name in ("kept", "claim", "write"))
_CLAIM, _WRITE = (_KEPT + part for part in _PARTS)


Retention = Callable[[TenantId], Awaitable[int]]
"""A tenant's retention in seconds, as in `Grant`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record as a claim left it; `owner` is who runs the request, or did last."""

    state: i.IdempotencyState
    owner: IngressId


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, as its owner last wrote. `running`: it has not ended."""

    owner: IngressId
    running: bool
    epoch: int
    prompt_tokens: int
    completion_tokens: int


class IdempotencyRecords:
    """Every tenant's records.

    Args:
        ttl_s: how long one is kept after its last change, whole seconds.
        prefix: of every key; tests keep apart by it.
        retention: a tenant's, which ends a record earlier; None: nobody has any.

    A record lies under its handle, a keyed hash of tenant and key: nobody can name a record without the key, and one
    tenant's key leads nowhere in another's. Its request id begins with the handle and goes on with what is another in
    each of its lives: the ledger remembers a request for longer than a key, and bills each id once. All methods raise
    Unavailable when Redis does not answer.
    """

    kind = "once"
    """Part of the records' keys."""
    full_bytes: int | None = None
    """A tenant that has so many bytes gets no new record; None: only answers are bounded."""

    def __init__(
        self,
        redis: RedisStore,
        sealer: Sealer,
        ttl_s: int,
        prefix: str = "baton:policy",
        retention: Retention | None = None,
    ) -> None:
        self._retention = retention
        self._redis = redis
        self._sealer = sealer
        self._ttl_s = ttl_s
        self._prefix = prefix

    @property
    def max_kept_bytes(self) -> int:
        """Most bytes of a tenant's answers; one that would be over it is not kept."""
        return MAX_KEPT_BYTES

    def life_s(self, state: str) -> int:
        """How long a record is kept that was last changed to this state, whole seconds."""
        return self._ttl_s

    def request_id(self, tenant: TenantId, ask: i.IdempotencyClaim) -> RequestId:
        """The id of a request, if this claim makes its record."""
        life = hashlib.blake2b(b"%d" % ask.seed, digest_size=_LIFE_HEX // 2).hexdigest()
        return RequestId(f"req-{self._sealer.mark(tenant, f'idempotency:{ask.name.hex()}')[:_HANDLE_HEX]}{life}")

    async def claim(self, tenant: TenantId, ask: i.IdempotencyClaim, lost: IngressId | None = None) -> Found:
        """The record, claimed for the asker when nobody else runs it.

        Args:
            lost: an ingress known to be gone; a record that it owns is free.

        Raises OtherBody, NotFound when there is none to resume, QuotaExceeded when the tenant has too many.
        """
        request_id = self.request_id(tenant, ask)
        arguments: list[str | bytes | int] = [
            request_id,
            self._sealer.mark(tenant, f"body:{ask.body.hex()}"),
            ask.ingress_id,
            ask.seed,
            self.life_s(i.RUNNING),
            lost or "",
            int(ask.resume),
            ask.known_run,
            ask.known_parts,
            PARTS_AT_ONCE,
            MAX_RECORDS,
            "" if self.full_bytes is None else self.full_bytes,
            ask.keyed,
        ]
        reply = await self._redis.script(_CLAIM, self._keys(tenant, request_id), arguments)
        return self._found(tenant, ask, reply)

    async def write(self, write: i.IdempotencyWrite) -> i.IdempotencyWritten:
        """Keep more of a run.

        Raises ProtocolError for a part that is too large, Conflict when parts are missing before the first one.
        """
        tenant, request_id = write.tenant, write.request_id
        if any(len(part) > MAX_PART_BYTES for part in write.parts):
            raise ProtocolError(f"a part of a record has at most {MAX_PART_BYTES} bytes")
        seal, place = self._sealer.seal, _place(request_id, write.run)
        numbered = enumerate(write.parts, write.first_part)
        arguments: list[str | bytes | int] = [
            request_id,
            write.ingress_id,
            write.run,
            write.state,
            await self._life_s(tenant, write.state),
            write.first_part,
            seal(tenant, _committed(request_id), write.committed),
            write.epoch,
            write.prompt_tokens,
            write.completion_tokens,
            self.max_kept_bytes,
            *(seal(tenant, f"{place}:{number}", part) for number, part in numbered),
        ]
        code = int(await self._redis.script(_WRITE, self._keys(tenant, request_id), arguments))
        if code == _GAP:
            raise Conflict("parts of the record are missing", code=i.RECORD_GAP)
        return i.IdempotencyWritten(held=code > _TAKEN_OVER, gone=code == _GONE, cancel=code == _SHALL_END)

    async def _life_s(self, tenant: TenantId, state: str) -> int:
        # What broke off ends with the retention too: whoever goes on with it comes within `LEAST_S`.
        life_s = self.life_s(state)
        if self._retention is None or state == i.RUNNING:
            return life_s
        return kept_s(life_s, await self._retention(tenant))

    async def progress(self, tenant: TenantId, request_id: RequestId) -> Progress | None:
        """How far a request is; None when it has no record."""
        names = ("id", "owner", "state", "epoch", "prompt_tokens", "completion_tokens")
        key = self._keys(tenant, request_id)[0]
        made, owner, state, *numbers = await self._redis.execute("HMGET", key, *names)
        if made is None or made.decode() != request_id:
            return None
        epoch, prompt, completion = (int(number or 0) for number in numbers)
        return Progress(IngressId(owner.decode()), state == b"running", epoch, prompt, completion)

    async def purge(self, tenant: TenantId) -> int:
        """Forget every record of a tenant, its texts with them; how many there were."""
        index = self._key(tenant, self.kind)
        ids = [RequestId(name.decode()) for name in await self._redis.execute("ZRANGE", index, 0, -1)]
        for request_id in ids:
            record, parts, _, _, given = self._keys(tenant, request_id)
            await self._redis.transaction([("UNLINK", record, parts, given), ("ZREM", index, request_id)])
        await self._redis.execute("UNLINK", self._key(tenant, f"{self.kind}-bytes"))
        return len(ids)

    def full(self) -> BatonError:
        """What a tenant is told that may have no more records."""
        message = f"you have {MAX_RECORDS} idempotency keys, the most there may be"
        return QuotaExceeded(message, param="Idempotency-Key", retry_after_s=FULL_RETRY_S)

    def missing(self) -> NotFound:
        """What is told of a record that is not there and may not be made."""
        return NotFound("there is no stream to resume", param="Last-Event-ID", code="stream_not_found")

    def _found(self, tenant: TenantId, ask: i.IdempotencyClaim, reply: Sequence[bytes]) -> Found:
        outcome = reply[0].decode()
        if outcome == "other_body":
            raise OtherBody("this Idempotency-Key stands for another request", param="Idempotency-Key")
        if outcome == "missing":
            raise self.missing()
        if outcome in ("full", "over"):
            raise self.full()
        _, run, owner, seed, created, committed, held, made = reply[:_REPLY_FIELDS]
        sealed, request_id = reply[_REPLY_FIELDS:], RequestId(made.decode())
        first = ask.known_parts if ask.known_run == int(run) else 0
        place, unseal = _place(request_id, int(run)), self._sealer.unseal
        state = i.IdempotencyState(
            request_id=request_id,
            outcome=outcome,
            run=int(run),
            seed=int(seed),
            created_s=int(created),
            # of the run before; nobody else needs it
            committed=unseal(tenant, _committed(request_id), committed) if outcome == i.YOURS and committed else b"",
            parts=tuple(unseal(tenant, f"{place}:{number}", part) for number, part in enumerate(sealed, first)),
            more=first + len(sealed) < int(held),
        )
        return Found(state, IngressId(owner.decode()))

    def _key(self, tenant: TenantId, what: str) -> str:
        return f"{self._prefix}:{{{tenant}}}:{what}"

    def _keys(self, tenant: TenantId, request_id: RequestId, kind: str = "") -> list[str]:
        handle = request_id.removeprefix("req-")[:_HANDLE_HEX]
        kind = kind or self.kind
        names = (f"{kind}:{handle}", f"{kind}-parts:{handle}", kind, f"{kind}-bytes", f"{kind}-input:{handle}")
        return [self._key(tenant, name) for name in names]


def _place(request_id: RequestId, run: int) -> str:
    return f"idempotency:{request_id}:{run}"


def _committed(request_id: RequestId) -> str:
    return f"idempotency:{request_id}:committed"
