"""The configuration of nats-server, generated from the subjects table: one user a service, least permission. Pure.

A service may publish exactly what the table says it sends, subscribe to exactly what it receives and its own reply
inbox, and answer what it was asked. Of JetStream it may reach its own streams, consumers and leases. What is not listed
is denied, `$SYS.>`, `$JS.API.>` and foreign inboxes included.

Services share one account. Each tenant has an account of its own with one user, into which nothing is imported but its
own three subjects: a subject, an inbox or a reply of another tenant does not exist there. JetStream is not enabled in
it; lines cross into the services' account, where a stream takes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.bus.envelope import INBOX_PREFIX, MAX_PAYLOAD_BYTES, inbox_prefix
from shared.bus.streams import LEASE_BUCKET, SUBMIT_HOP, stream_name, submit_stream
from shared.contracts import subjects
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import TenantId, is_id
from shared.contracts.subjects import ADMIN, HOPS, SERVICES, TENANT, WORKERS, Hop

MAX_MEMORY_BYTES = 256 * 1024 * 1024
MAX_FILE_BYTES = 4 * 1024 * 1024 * 1024
"""Disk for all streams. A server changes it only by a new start, so it has room for some 200 tenants' lines."""
ANSWER_EXPIRES = "10m"
"""How long a service may take to answer a request: longer than any hop's time-out."""
MAX_TENANT_CONNECTIONS = 64
MAX_TENANT_SUBSCRIPTIONS = 256
"""Of each of its connections; nats-server keeps every one in memory."""

ACCOUNT = "BATON"
"""The services' account. Tenants' accounts go by the tenants' ids, which have no capital letters."""
USERS = (*SERVICES, ADMIN)
"""The users of the services' account."""
TENANT_TOKEN = len(subjects.batch_submit(TenantId("x")).split("."))
"""Which token of a tenant's subjects names it, from 1."""

OWN_NAME_HOPS = ("trace", "audit", "purge.ack")
"""Hops whose last token is the sender: a service may only speak in its own name."""
LEASE_HOLDERS = ("scheduler",)


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one NATS user may do. `answers`: it may publish to the reply subject of what it was sent."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool


def permissions(service: str, tenants: Sequence[TenantId] = ()) -> Permissions:
    """The permissions of one service's user; `tenants`: those with a user of their own."""
    publish: list[str] = []
    subscribe = [f"{inbox_prefix(service)}.>"]
    for hop in HOPS:
        if service in hop.senders:
            publish.append(_sent_by(service, hop))
        if service in hop.receivers and hop.name == SUBMIT_HOP:
            for stream in map(submit_stream, tenants):
                publish += [*_consuming(service, stream), f"$JS.API.CONSUMER.INFO.{stream}.{service}"]
        elif service in hop.receivers and hop.kind == "stream":
            publish += _consuming(service, stream_name(hop.name), own=hop.senders == (service,))
        elif service in hop.receivers:
            subscribe.append(hop.pattern)
    if service in LEASE_HOLDERS:
        publish += _leasing()
    answers = any(service in hop.receivers and hop.kind == "request" for hop in HOPS)
    return Permissions(_unique(publish), _unique(subscribe), answers)


def tenant_permissions(tenant: TenantId) -> Permissions:
    """The permissions of a tenant's user: submit, ask for results, hear of finished lines. Raises InvalidInput."""
    check_tenant(tenant)
    publish = [_of(hop, tenant) for hop in HOPS if TENANT in hop.senders]
    subscribe = [_of(hop, tenant) for hop in HOPS if TENANT in hop.receivers]
    return Permissions(tuple(publish), (*subscribe, f"{tenant_inbox(tenant)}.>"), answers=False)


def tenant_user(tenant: TenantId) -> str:
    """The NATS user of a tenant; a prefix keeps a tenant called `policy` apart from the service."""
    return f"tenant-{tenant}"


def tenant_inbox(tenant: TenantId) -> str:
    """The reply inbox of a tenant's user."""
    return f"{INBOX_PREFIX}tenant_{tenant}"


def check_tenant(tenant: str) -> TenantId:
    """`tenant`, if it may stand in a subject. Raises InvalidInput naming it."""
    if not is_id(tenant):
        raise InvalidInput(f"tenant {tenant!r} is not of the form [a-z0-9-]{{1,40}}", param="tenant")
    return TenantId(tenant)


def nats_config(
    passwords: Mapping[str, str], tenants: Mapping[TenantId, str] | None = None, store_key: str = ""
) -> str:
    """The text of a nats-server configuration file, JSON being a subset of its format.

    Address, port, store and ports file are the starter's business: flags of nats-server.

    Args:
        passwords: one for each of USERS.
        tenants: the password of each tenant with a user of its own.
        store_key: encrypts streams on disk, where tenants' lines lie until they are taken; empty: they lie open.

    Raises InvalidInput when a tenant's id may not stand in a subject.
    """
    tenants = tenants or {}
    ids = [check_tenant(tenant) for tenant in sorted(tenants)]
    services: dict[str, object] = {
        "jetstream": "enabled",
        "users": [_user(user, passwords[user], permissions(user, ids)) for user in USERS],
        "exports": [{kind: hop.pattern, "account_token_position": TENANT_TOKEN} for kind, hop in _crossing()],
    }
    sealed = {"cipher": "aes", "key": store_key} if store_key else {}
    accounts = {ACCOUNT: services} | {str(tenant): _account(tenant, tenants[tenant]) for tenant in ids}
    config = {
        "max_payload": MAX_PAYLOAD_BYTES,
        "jetstream": {"max_mem": MAX_MEMORY_BYTES, "max_file": MAX_FILE_BYTES} | sealed,
        "accounts": accounts,
    }
    return json.dumps(config, indent=2) + "\n"


def _account(tenant: TenantId, password: str) -> dict[str, object]:
    return {
        "users": [_user(tenant_user(tenant), password, tenant_permissions(tenant))],
        "imports": [{kind: {"account": ACCOUNT, "subject": _of(hop, tenant)}} for kind, hop in _crossing()],
        "limits": {"max_connections": MAX_TENANT_CONNECTIONS, "max_subscriptions": MAX_TENANT_SUBSCRIPTIONS},
    }


def _crossing() -> list[tuple[str, Hop]]:
    """Hops between tenants and services, each with the kind of export NATS has for it: what tenants publish, and
    may get an answer to, is a `service`; what they hear a `stream`."""
    sent = [("service", hop) for hop in HOPS if TENANT in hop.senders]
    return sent + [("stream", hop) for hop in HOPS if TENANT in hop.receivers]


def _of(hop: Hop, tenant: TenantId) -> str:
    return hop.pattern.replace("*", tenant)


def _user(name: str, password: str, allowed: Permissions) -> dict[str, object]:
    rules: dict[str, object] = {
        "publish": {"allow": list(allowed.publish)},
        "subscribe": {"allow": list(allowed.subscribe)},
    }
    if allowed.answers:
        rules["allow_responses"] = {"max": 1, "expires": ANSWER_EXPIRES}
    return {"user": name, "password": password, "permissions": rules}


def _sent_by(service: str, hop: Hop) -> str:
    if hop.name not in OWN_NAME_HOPS:
        return hop.pattern
    return {"trace": subjects.trace, "audit": subjects.audit, "purge.ack": subjects.purge_ack}[hop.name](service)


def _consuming(service: str, stream: str, own: bool = False) -> list[str]:
    """Make the consumer named after the service, pull from it, acknowledge; make the stream too, unless a worker.
    Of a stream that is its `own`, spoken and heard by nobody else, it may have any consumers, see how far they are, and
    drop them.

    NATS checks nobody's permission for the subjects a stream takes: who makes one could read everything.
    """
    make = [] if service in WORKERS else [f"$JS.API.STREAM.CREATE.{stream}"]
    consumer = "*" if own else service
    return [
        *make,
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{consumer}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
        f"$JS.ACK.{stream}.{consumer}.>",
        *([f"$JS.API.CONSUMER.{verb}.{stream}.{consumer}" for verb in ("INFO", "DELETE")] if own else []),
    ]


def _leasing() -> list[str]:
    return [
        f"$JS.API.STREAM.CREATE.KV_{LEASE_BUCKET}",
        f"$JS.API.DIRECT.GET.KV_{LEASE_BUCKET}.$KV.{LEASE_BUCKET}.>",
        f"$KV.{LEASE_BUCKET}.>",
    ]


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
