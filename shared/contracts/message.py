"""The base of everything that crosses the bus, and its codec.

msgpack maps tagged with the class name. Fields are only ever appended, with defaults; unknown fields are ignored. A
message's docstring names sender, receiver and subject. `traceparent` and the remaining budget ride in headers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from shared.contracts.errors import ProtocolError

MAX_MESSAGE_BYTES = 512 * 1024
"""Stream frames are split at this size; NATS itself is configured with 8 MiB for submits of long prompts."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag=True):
    """Anything that crosses the bus."""


_encoder = msgspec.msgpack.Encoder()


@lru_cache(maxsize=256)
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message_type)


def encode(message: msgspec.Struct | bytes) -> bytes:
    """The message's wire bytes; bytes are sent as they are, for hops that strangers with plain NATS clients use.

    Raises ProtocolError for a value the wire has no room for, such as an integer of more than 64 bits.
    """
    if isinstance(message, bytes):
        return message
    try:
        return _encoder.encode(message)
    except (OverflowError, msgspec.MsgspecError, TypeError) as exc:
        raise ProtocolError(f"{type(message).__name__} does not encode: {exc}") from exc


def decode(data: bytes, message_type: Any) -> Any:
    """A message of `message_type` (a class or a union of them; `bytes` takes the payload as it is).

    Raises ProtocolError when the bytes are not one.
    """
    if message_type is bytes:
        return data
    try:
        return _decoder(message_type).decode(data)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"message does not decode: {exc}") from exc
