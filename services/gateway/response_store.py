"""What policy keeps of stored responses, as a gateway asks for it: by id, with the asker's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.event_log import DATA, EventLog
from services.gateway.service import GatewayService
from services.gateway.stored_request import StoredRequest, unpack
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts import subjects
from shared.contracts.errors import Internal
from shared.contracts.ids import RequestId
from shared.contracts.messages import Refusal

_DATA_LINE = b"\n" + DATA


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response as it is. `final` is there once it has ended."""

    found: r.ResponseFound
    final: dict[str, Any] | None


class ResponseStore:
    """Questions to policy. All raise NotFound for what is not there or another tenant's, Unavailable."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    async def look(self, key_hash: bytes, request_id: RequestId) -> Kept:
        """How a response is."""
        found = await self._find(r.ResponseFind(key_hash=key_hash, request_id=request_id, last_parts=True))
        if found.outcome != i.DONE:
            return Kept(found, None)
        return Kept(found, _final(found.parts) or await self._whole(key_hash, request_id, found))

    async def request(self, key_hash: bytes, request_id: RequestId) -> StoredRequest | None:
        """What it was made from; None while that is not kept."""
        parts: list[bytes] = []
        while True:
            ask = r.ResponseFind(key_hash=key_hash, request_id=request_id, known_parts=-1, known_input=len(parts))
            found = await self._find(ask)
            parts += found.input
            if len(parts) >= found.num_input or not found.input:
                return unpack(parts)

    async def cancel(self, key_hash: bytes, request_id: RequestId) -> None:
        """It shall end."""
        await self.ask(r.ResponseCancel(key_hash=key_hash, request_id=request_id))

    async def delete(self, key_hash: bytes, request_id: RequestId) -> None:
        """Forget it."""
        await self.ask(r.ResponseDelete(key_hash=key_hash, request_id=request_id))

    async def ask(self, message: msgspec.Struct) -> Any:
        """Policy's answer. Raises what its refusal says."""
        replies = i.IdempotencyState | i.IdempotencyWritten | r.ResponseFound | r.ResponseChanged | Refusal
        return await self._service.ingress.ask_policy(subjects.POLICY_RESPONSES, message, replies)

    async def _find(self, ask: r.ResponseFind) -> r.ResponseFound:
        found: r.ResponseFound = await self.ask(ask)
        return found

    async def _whole(self, key_hash: bytes, request_id: RequestId, found: r.ResponseFound) -> dict[str, Any]:
        """Of an answer whose last event is longer than the last parts."""
        log = EventLog(found.run)
        held = 0
        while not log.complete:
            ask = r.ResponseFind(key_hash=key_hash, request_id=request_id, known_run=found.run, known_parts=held)
            parts = (await self._find(ask)).parts
            if not parts:
                raise Internal("a stored response is not whole")
            for part in parts:
                log.feed(part)
            held += len(parts)
        final = _response_of(log.events[-1]) if log.events else None
        if final is None:
            raise Internal("a stored response cannot be read")
        return final


def _final(parts: tuple[bytes, ...]) -> dict[str, Any] | None:
    """The response at the end of an answer's last parts; None when it began before them."""
    log = EventLog(0)
    for part in parts:
        log.feed(part)
    return _response_of(log.events[-1]) if log.complete and log.events else None


def _response_of(event: bytes) -> dict[str, Any] | None:
    """The response that an answer's last event tells, or that is the whole answer."""
    stream = event.startswith(b"event: ")
    try:
        found = msgspec.json.decode(event.partition(_DATA_LINE)[2] if stream else event)
    except msgspec.DecodeError:
        return None
    response = found.get("response") if stream and isinstance(found, dict) else found
    return response if isinstance(response, dict) and response.get("object") == "response" else None
