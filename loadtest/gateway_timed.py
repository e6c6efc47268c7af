"""`python -m loadtest.gateway_timed`: a gateway that notes what of a request's time is its own.

The gateway as it is, with five places watched: bytes of a client come, policy is asked and answers, the scheduler is
asked, the first frame with tokens comes, the answer's bytes are given to the socket. Noting costs a few microseconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from loadtest.gateway_notes import TIMES_VARIABLE, Notes
from services.gateway.__main__ import main
from services.gateway.connection import Connection
from shared.bus.bus import Delivery
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_reading import DirectReader
from shared.contracts.messages import Admit, Submit
from shared.ingress.ingress import Ingress
from shared.ingress.session import Session
from shared.lifecycle.runtime import run_service

_came: ContextVar[float] = ContextVar("came", default=0.0)


def watch(notes: Notes) -> None:
    """Put the notes into the classes the gateway is made of."""
    _watch_client(notes)
    _watch_bus(notes)


def _watch_client(notes: Notes) -> None:
    received, sent = Connection.data_received, Session.sent

    def data_received(self: Connection, data: bytes) -> None:
        _came.set(time.monotonic())  # the task that answers begins in here
        received(self, data)

    def sent_(self: Session, num_bytes: int) -> None:
        notes.note(self.request_id, "answered", time.monotonic())
        sent(self, num_bytes)

    _put(Connection, "data_received", data_received)
    _put(Session, "sent", sent_)


def _watch_bus(notes: Notes) -> None:
    received, ask, on_frame = DirectReader.data_received, NatsBus.request, Ingress._on_frame

    def data_received(self: DirectReader, data: bytes) -> None:
        notes.read = time.monotonic()
        received(self, data)

    async def request(self: NatsBus, subject: str, message: Any, reply_type: Any, *, timeout_s: float) -> Any:
        if isinstance(message, Admit):
            notes.note(message.request_id, "came", _came.get())
            notes.note(message.request_id, "asked", time.monotonic())
            try:
                return await ask(self, subject, message, reply_type, timeout_s=timeout_s)
            finally:
                notes.note(message.request_id, "granted", time.monotonic())
        if isinstance(message, Submit):
            notes.note(message.attempt.request_id, "submitted", time.monotonic())
        return await ask(self, subject, message, reply_type, timeout_s=timeout_s)

    def on_frame_(self: Ingress, delivery: Delivery) -> None:
        for record in delivery.message.records:
            notes.note(record.attempt.request_id, "token", notes.read)
        on_frame(self, delivery)

    _put(DirectReader, "data_received", data_received)
    _put(NatsBus, "request", request)
    _put(Ingress, "_on_frame", on_frame_)


def _put(owner: type, name: str, function: Callable[..., Awaitable[Any] | None]) -> None:
    setattr(owner, name, function)


if __name__ == "__main__":
    found = Notes()
    watch(found)
    try:
        run_service("gateway", main, drain_s=lambda settings: settings.gateway.shutdown_s)
    finally:
        Path(os.environ[TIMES_VARIABLE]).write_text(json.dumps(found.of), encoding="utf-8")
