"""The configuration of nats-server, generated from the subjects table: one user a service, least permission. Pure.

A service may publish exactly what the table says it sends, subscribe to exactly what it receives and its own reply
inbox, and answer what it was asked. Of JetStream it may reach its own streams, consumers and leases. What is not listed
is denied, `$SYS.>`, `$JS.API.>` and foreign inboxes included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.bus.envelope import MAX_PAYLOAD_BYTES, inbox_prefix
from shared.bus.streams import LEASE_BUCKET, stream_name
from shared.contracts import subjects
from shared.contracts.subjects import HOPS, SERVICES, WORKERS, Hop

MAX_MEMORY_BYTES = 256 * 1024 * 1024
MAX_FILE_BYTES = 2 * 1024 * 1024 * 1024
ANSWER_EXPIRES = "10m"
"""How long a service may take to answer a request: longer than any hop's time-out."""

OWN_NAME_HOPS = ("trace", "audit")
"""Hops whose last token is the sender: a service may only speak in its own name."""
LEASE_HOLDERS = ("scheduler",)


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one NATS user may do. `answers`: it may publish to the reply subject of what it was sent."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool


def permissions(service: str) -> Permissions:
    """The permissions of one service's user."""
    publish: list[str] = []
    subscribe = [f"{inbox_prefix(service)}.>"]
    for hop in HOPS:
        if service in hop.senders:
            publish.append(_sent_by(service, hop))
        if service in hop.receivers and hop.kind == "stream":
            publish += _consuming(service, stream_name(hop.name))
        elif service in hop.receivers:
            subscribe.append(hop.pattern)
    if service in LEASE_HOLDERS:
        publish += _leasing()
    answers = any(service in hop.receivers and hop.kind == "request" for hop in HOPS)
    return Permissions(_unique(publish), _unique(subscribe), answers)


def nats_config(passwords: Mapping[str, str]) -> str:
    """The text of a nats-server configuration file, JSON being a subset of its format.

    Address, port, store and ports file are the starter's business: flags of nats-server.

    Args:
        passwords: one for each of SERVICES.
    """
    config = {
        "max_payload": MAX_PAYLOAD_BYTES,
        "jetstream": {"max_mem": MAX_MEMORY_BYTES, "max_file": MAX_FILE_BYTES},
        "authorization": {"users": [_user(service, passwords[service]) for service in SERVICES]},
    }
    return json.dumps(config, indent=2) + "\n"


def _user(service: str, password: str) -> dict[str, object]:
    allowed = permissions(service)
    rules: dict[str, object] = {
        "publish": {"allow": list(allowed.publish)},
        "subscribe": {"allow": list(allowed.subscribe)},
    }
    if allowed.answers:
        rules["allow_responses"] = {"max": 1, "expires": ANSWER_EXPIRES}
    return {"user": service, "password": password, "permissions": rules}


def _sent_by(service: str, hop: Hop) -> str:
    if hop.name not in OWN_NAME_HOPS:
        return hop.pattern
    return {"trace": subjects.trace, "audit": subjects.audit}[hop.name](service)


def _consuming(service: str, stream: str) -> list[str]:
    """Make the consumer named after the service, pull from it, acknowledge; make the stream too, unless a worker.

    NATS checks nobody's permission for the subjects a stream takes: who makes one could read everything.
    """
    make = [] if service in WORKERS else [f"$JS.API.STREAM.CREATE.{stream}"]
    return [
        *make,
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{service}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{service}",
        f"$JS.ACK.{stream}.{service}.>",
    ]


def _leasing() -> list[str]:
    return [
        f"$JS.API.STREAM.CREATE.KV_{LEASE_BUCKET}",
        f"$JS.API.DIRECT.GET.KV_{LEASE_BUCKET}.$KV.{LEASE_BUCKET}.>",
        f"$KV.{LEASE_BUCKET}.>",
    ]


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
