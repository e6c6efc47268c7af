"""What goes over a TCP connection between two workers: framed requests and replies, and spans as they lie in memory.

A request names spans, a reply says how many bytes follow it, and the spans come behind it in the order asked for. What
fails is one of four errors, whose codes are the reasons on traces and in metrics: `transfer_unreachable`,
`transfer_refused`, `transfer_closed`, `transfer_timed_out`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from typing import TypeVar

import msgspec

from shared.contracts.attempt import Attempt
from shared.contracts.errors import DeadlineExceeded, Forbidden, ProtocolError, Unavailable

UNREACHABLE, REFUSED = "transfer_unreachable", "transfer_refused"
CLOSED, TIMED_OUT = "transfer_closed", "transfer_timed_out"
_HEAD = struct.Struct("<4sI")  # magic, bytes of the frame
_MAGIC = b"BKV1"
_CHUNK_BYTES = 1 << 20
"""Most bytes of one call: a TLS call holds them encrypted as well."""

Span = tuple[int, int, int]
"""(layer group, block id, generation)."""


class ReadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """sink → source: the spans of blocks that a commit of the attempt named."""

    attempt: Attempt
    token: bytes  # of the attempt's lease
    incarnation: int  # of the source
    fingerprint: str
    spans: tuple[Span, ...]


class ReadReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """source → sink: that many bytes follow, or why none do."""

    num_bytes: int = 0
    refused: str = ""


Frame = TypeVar("Frame", ReadRequest, ReadReply)


class Wire:
    """One end of a connection. Every call is bounded by seconds on the monotonic clock."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self.sock = sock
        self._stall_s = stall_s

    def send_frame(self, frame: ReadRequest | ReadReply, until: float) -> None:
        """Raises Unavailable (closed) or DeadlineExceeded."""
        body = msgspec.msgpack.encode(frame)
        self.send(memoryview(_HEAD.pack(_MAGIC, len(body)) + body), until)

    def receive_frame(self, frame_type: type[Frame], max_bytes: int, until: float, stall_s: float = 0.0) -> Frame:
        """The next frame; `stall_s` is how long its first byte may take, if not as long as any.

        Raises:
            ProtocolError: it is too large, or no such frame.
            Unavailable: the connection was closed.
            DeadlineExceeded: it did not come in time.
        """
        head = bytearray(_HEAD.size)
        self.receive(memoryview(head), until, stall_s)
        magic, size = _HEAD.unpack(head)
        if magic != _MAGIC or size > max_bytes:
            raise ProtocolError("a frame of a KV transfer is too large, or of another protocol", code=REFUSED)
        body = bytearray(size)
        self.receive(memoryview(body), until)
        try:
            return msgspec.msgpack.decode(body, type=frame_type)
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"a frame of a KV transfer is no {frame_type.__name__}", code=REFUSED) from exc

    def send(self, data: memoryview, until: float) -> None:
        """All of `data`, straight from where it lies. Raises Unavailable (closed) or DeadlineExceeded."""
        while data.nbytes:
            self._allow(until, self._stall_s)
            try:
                sent = self.sock.send(data[:_CHUNK_BYTES])
            except OSError as exc:
                raise _mapped(exc) from exc
            data = data[sent:]

    def receive(self, into: memoryview, until: float, stall_s: float = 0.0) -> None:
        """Fill `into`. Raises Unavailable (closed) or DeadlineExceeded."""
        while into.nbytes:
            self._allow(until, stall_s or self._stall_s)
            try:
                got = self.sock.recv_into(into[:_CHUNK_BYTES])
            except OSError as exc:
                raise _mapped(exc) from exc
            if not got:
                raise Unavailable("the connection was closed", code=CLOSED)
            into, stall_s = into[got:], 0.0

    def shut(self) -> None:
        """End it from any thread: whoever waits in a call here fails at once."""
        with contextlib.suppress(OSError):  # it is closed
            # not the method of a TLS socket, which would go on in plain text
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self.sock.close()

    def _allow(self, until: float, stall_s: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("a transfer of KV is too slow", code=TIMED_OUT)
        self.sock.settimeout(min(stall_s, left))


def _mapped(exc: OSError) -> Unavailable | DeadlineExceeded:
    if isinstance(exc, TimeoutError):
        return DeadlineExceeded("nothing moved in time", code=TIMED_OUT)
    reason = exc.reason if isinstance(exc, ssl.SSLError) else exc.strerror
    return Unavailable(f"the connection broke: {reason or type(exc).__name__}", code=CLOSED)


def refused(reason: str) -> Forbidden:
    """The source said no."""
    return Forbidden(reason, code=REFUSED)
