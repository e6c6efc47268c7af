"""What a stored response was made from, as it is kept beside its answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.event_log import PART_BYTES
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import RequestId
from shared.ingress.responses_body import response_id
from shared.ingress.responses_items import Item, told_items
from shared.ingress.responses_schema import InputItem, ResponsesRequest

_PREFIX = response_id("")
_ID_DIGITS = 32
_HEX = frozenset("0123456789abcdef")


class StoredRequest(msgspec.Struct, frozen=True):
    """`items` is its whole input, with what came before; `response` the response as it was before it began.

    `fields` is the request but for its input. `name` is its record's.
    """

    name: bytes
    fields: dict[str, Any]
    items: list[Item]
    response: dict[str, Any]

    @property
    def background(self) -> bool:
        """It goes on without its client."""
        return bool(self.fields.get("background"))

    @property
    def stream(self) -> bool:
        """It was asked for as a stream."""
        return bool(self.fields.get("stream"))

    def body(self) -> bytes:
        """The request again, with its whole input."""
        return msgspec.json.encode({**self.fields, "input": self.items})


def make_stored(
    asked: ResponsesRequest, items: Sequence[InputItem], name: bytes, response: dict[str, Any]
) -> StoredRequest:
    """A request as it is kept."""
    return StoredRequest(name, asked.model_dump(exclude_none=True, by_alias=True), told_items(items, name), response)


def pack(request: StoredRequest) -> list[bytes]:
    """In parts of a message's size."""
    whole = msgspec.msgpack.encode(request)
    return [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)]


def unpack(parts: Sequence[bytes]) -> StoredRequest | None:
    """The request; None when there is none, or not all of it."""
    try:
        return msgspec.msgpack.decode(b"".join(parts), type=StoredRequest)
    except msgspec.DecodeError:
        return None


def request_id_of(given: str) -> RequestId | None:
    """The request's id that a response's stands for; None for what is no id."""
    digits = given.removeprefix(_PREFIX)
    if not given.startswith(_PREFIX) or len(digits) != _ID_DIGITS or not _HEX.issuperset(digits):
        return None
    return RequestId(f"req-{digits}")


def no_previous(given: str) -> InvalidInput:
    """What cannot be gone on from: it is not there, or another tenant's."""
    return InvalidInput(
        f"there is no response {given[:64]!r} to go on from; was it created with store: true?",
        param="previous_response_id",
        code="previous_response_not_found",
    )
