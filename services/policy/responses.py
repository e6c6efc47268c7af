"""Stored responses in Redis, sealed: records as of an Idempotency-Key, with what each was made from beside its answer.

While one is under way its record lives for a day from its last news; it is kept for `ttl_s` once it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.policy.idempotency import MAX_PART_BYTES, PARTS_AT_ONCE, IdempotencyRecords
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts.errors import BatonError, Conflict, Forbidden, NotFound, ProtocolError
from shared.contracts.ids import IngressId, RequestId, TenantId

MAX_RESPONSES_BYTES = 512 * 1024 * 1024
"""A tenant whose responses take so much, as they are stored, stores no more."""
RUNNING_S = 86400
LOOKED_AT_ONCE = 256
"""Records of responses in the background read in one round trip to Redis."""
_ANY_BYTES = 2**53
STORAGE_LIMIT = "storage_limit_exceeded"

_LUA = Path(__file__).with_name("lua")
_INPUT, _FIND, _DELETE, _CANCEL = (
    (_LUA / f"response_{name}.lua").read_text() for name in ("input", "find", "delete", "cancel")
)


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """A response in the background that has not ended. `owner` runs it; None: nobody does."""

    tenant: TenantId
    request_id: RequestId
    key_hash: bytes
    owner: IngressId | None


class ResponseRecords(IdempotencyRecords):
    """Every tenant's stored responses. All methods raise Unavailable when Redis does not answer."""

    kind = "response"
    full_bytes = MAX_RESPONSES_BYTES

    @property
    def max_kept_bytes(self) -> int:
        """None: what has begun may end, and is bounded by itself."""
        return _ANY_BYTES

    def life_s(self, state: str) -> int:
        """How long a record is kept that was last changed to this state, whole seconds."""
        return self._ttl_s if state == i.DONE else RUNNING_S

    def full(self) -> BatonError:
        """What a tenant is told that may store no more."""
        message = "you store as many responses as you may; delete some, or ask with store: false"
        return Forbidden(message, param="store", code=STORAGE_LIMIT)

    def missing(self) -> NotFound:
        """What is told of a response that is gone."""
        return NotFound("there is no such response", param="response_id")

    async def keep_input(self, news: r.ResponseInput) -> r.ResponseChanged:
        """Keep more of what a response is made from. Raises ProtocolError for a part that is too large, Conflict when
        parts are missing before the first one."""
        if any(len(part) > MAX_PART_BYTES for part in news.parts):
            raise ProtocolError(f"a part of a record has at most {MAX_PART_BYTES} bytes")
        tenant, request_id = news.tenant, news.request_id
        numbered = enumerate(news.parts, news.first_part)
        arguments: list[str | bytes | int] = [
            request_id,
            news.ingress_id,
            news.run,
            RUNNING_S,
            news.first_part,
            *(self._sealer.seal(tenant, _input_place(request_id, number), part) for number, part in numbered),
        ]
        if news.key_hash:
            await self._redis.execute("HSET", self._background, f"{tenant}/{request_id}", news.key_hash.hex())
        code = int(await self._redis.script(_INPUT, self._keys(tenant, request_id), arguments))
        if code < 0:
            raise Conflict("parts of the record are missing", code=i.RECORD_GAP)
        return r.ResponseChanged(held=bool(code))

    async def find(self, tenant: TenantId, ask: r.ResponseFind) -> tuple[r.ResponseFound, IngressId]:
        """What there is, and who runs it or did last. Raises NotFound."""
        arguments: list[str | bytes | int] = [
            ask.request_id,
            ask.known_run,
            ask.known_parts,
            PARTS_AT_ONCE,
            int(ask.last_parts),
            ask.known_input,
        ]
        reply = await self._redis.script(_FIND, self._keys(tenant, ask.request_id), arguments)
        if reply is None:
            raise no_such_response(ask.request_id)
        owner, state, run, tokens, cancel, num_parts, num_input, first, parts, given = reply
        request_id, unseal = ask.request_id, self._sealer.unseal
        place = f"idempotency:{request_id}:{int(run)}"
        found = r.ResponseFound(
            outcome=state.decode(),
            run=int(run),
            num_parts=num_parts,
            num_input=num_input,
            parts=tuple(unseal(tenant, f"{place}:{number}", part) for number, part in enumerate(parts, first)),
            input=tuple(
                unseal(tenant, _input_place(request_id, number), part)
                for number, part in enumerate(given, ask.known_input)
            ),
            completion_tokens=int(tokens),
            cancelled=bool(cancel),
        )
        return found, IngressId(owner.decode())

    async def in_background(self) -> list[BackgroundRun]:
        """Those of every tenant that have not ended. Those that have are forgotten here."""
        listed = _pairs(await self._redis.execute("HGETALL", self._background))
        found: list[BackgroundRun] = []
        for first in range(0, len(listed), LOOKED_AT_ONCE):
            found += await self._still_in_background(listed[first : first + LOOKED_AT_ONCE])
        return found

    async def _still_in_background(self, listed: Sequence[tuple[bytes, bytes]]) -> list[BackgroundRun]:
        names = [_named(field) for field, _ in listed]
        looks = [("HMGET", self._keys(*name)[0], "id", "owner", "state") for name in names]
        found, ended = [], []
        for (field, key_hash), name, is_now in zip(listed, names, await self._redis.transaction(looks), strict=True):
            made, owner, state = is_now
            if made is None or made.decode() != name[1] or state.decode() == i.DONE:
                ended.append(field)
                continue
            owned = IngressId(owner.decode()) if state.decode() == i.RUNNING else None
            found.append(BackgroundRun(*name, bytes.fromhex(key_hash.decode()), owned))
        if ended:
            await self._redis.execute("HDEL", self._background, *ended)
        return found

    @property
    def _background(self) -> str:
        return f"{self._prefix}:responses-in-background"

    async def cancel(self, tenant: TenantId, request_id: RequestId) -> r.ResponseChanged:
        """It shall end. Raises NotFound."""
        await self._change(_CANCEL, self._keys(tenant, request_id), request_id)
        return r.ResponseChanged()

    async def delete(self, tenant: TenantId, request_id: RequestId) -> r.ResponseChanged:
        """Forget it, and what is remembered under its Idempotency-Key. Raises NotFound."""
        keys = self._keys(tenant, request_id)
        keyed = RequestId((await self._redis.execute("HGET", keys[0], "keyed") or b"").decode())
        if keyed:
            keys += self._keys(tenant, keyed, IdempotencyRecords.kind)
        await self._change(_DELETE, keys, request_id, keyed)
        return r.ResponseChanged()

    async def _change(self, script: str, keys: Sequence[str], request_id: RequestId, *more: str) -> None:
        if not await self._redis.script(script, keys, [request_id, *more]):
            raise no_such_response(request_id)


def no_such_response(request_id: RequestId) -> NotFound:
    """What is missing, deleted, or another tenant's: all look alike."""
    return NotFound(f"there is no response 'resp_{request_id.removeprefix('req-')[:64]}'", param="response_id")


def _named(field: bytes) -> tuple[TenantId, RequestId]:
    tenant, _, request_id = field.decode().partition("/")
    return TenantId(tenant), RequestId(request_id)


def _pairs(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Fields and values, in either of the forms in which the client gives a hash."""
    if isinstance(flat, Mapping):
        return list(flat.items())
    return list(zip(flat[::2], flat[1::2], strict=True))


def _input_place(request_id: RequestId, number: int) -> str:
    return f"response:{request_id}:input:{number}"
