"""nats-py's client, changed where its tasks, queues and futures cost more than the messages they carry."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.command import pub_cmd

log = logging.getLogger("baton.bus")

MAX_UNSENT_BYTES = 256 * 1024
"""What may lie in this process for a server that takes nothing, before a message waits for it in its sender's queue."""


class AtOnce:
    """In the place of a subscription's future: nats-py gives it each message where it reads it.

    A callback would have a queue and a task of its own, which are woken for each message.
    """

    def __init__(self, take: Callable[[Msg], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        return False


class DirectClient(Client):
    """nats-py's client, with ways past its tasks and queues, and with headers as tenants like to write them."""

    async def _init_request_sub(self) -> None:
        await super()._init_request_sub()
        for sub in self._subs.values():
            if sub._cb == self._request_sub_callback:  # it only wakes who asked
                sub._future = AtOnce(self._on_reply)  # type: ignore[assignment]

    def _on_reply(self, msg: Msg) -> None:
        asking = self._resp_map.get(msg.subject[len(self._inbox_prefix) + 24 :])
        if asking is not None and not asking.done():
            asking.set_result(msg)

    def write(self, subject: str, payload: bytes) -> bool:
        """Give the socket a message without headers. False: others wait before it, or the server takes no more."""
        transport = self._transport
        if self._pending or self._status != Client.CONNECTED or not isinstance(transport, TcpTransport):
            return False
        writer = transport._io_writer
        if writer is None:
            return False
        socket = writer.transport
        if socket.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        socket.write(pub_cmd(subject, "", payload))
        return True

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except Exception:  # the library would stop reading for good
            log.warning("dropped a message's headers: they do not decode")
            return None

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """As nats-py's own, which looks at every character of every name."""
        found: dict[str, str] = {}
        for line in raw.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            key = name.strip()
            if colon and key.isascii() and len(key.split()) < 2:
                found[key.decode()] = value.strip().decode("utf-8", "replace")
        return found
