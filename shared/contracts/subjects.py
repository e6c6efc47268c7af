"""Every subject of the system, built in one place, and the table permissions are generated from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shared.contracts import admin_messages as am
from shared.contracts import batch_messages as b
from shared.contracts import idempotency_messages as i
from shared.contracts import messages as m
from shared.contracts import response_messages as r
from shared.contracts.errors import ProtocolError
from shared.contracts.ids import IngressId, TenantId, WorkerId, is_id

PREFIX = "baton.v1"


def _id(text: str) -> str:
    if not is_id(text):
        raise ProtocolError(f"{text!r} may not stand in a subject: ids are [a-z0-9-]{{1,40}}")
    return text


POLICY_AUTHENTICATE = f"{PREFIX}.policy.authenticate"
POLICY_ADMIT = f"{PREFIX}.policy.admit"
POLICY_ADMIT_TENANT = f"{PREFIX}.policy.admit-tenant"
POLICY_ADMIN = f"{PREFIX}.policy.admin"
POLICY_IDEMPOTENCY = f"{PREFIX}.policy.idempotency"
POLICY_RESPONSES = f"{PREFIX}.policy.responses"
RESPONSES_ADOPT = f"{PREFIX}.responses.adopt"
POLICY_SETTLE = f"{PREFIX}.policy.settle"
POLICY_EVENTS = f"{PREFIX}.policy.events"
INDEX_MATCH = f"{PREFIX}.index.match"
INDEX_EXTEND = f"{PREFIX}.index.extend"
PURGE_ORDER = f"{PREFIX}.purge.order"
BATCH_FILES = f"{PREFIX}.batch.files"
BATCH_JOBS = f"{PREFIX}.batch.jobs"


def sched_submit(pool: str) -> str:
    return f"{PREFIX}.sched.{_id(pool)}.submit"


def sched_withdraw(pool: str) -> str:
    return f"{PREFIX}.sched.{_id(pool)}.withdraw"


def sched_beat(pool: str) -> str:
    return f"{PREFIX}.sched.{_id(pool)}.beat"


def gateway_event(ingress: IngressId) -> str:
    return f"{PREFIX}.gateway.{_id(ingress)}.event"


def gateway_beat(ingress: IngressId) -> str:
    return f"{PREFIX}.gateway.{_id(ingress)}.beat"


def gateway_ask(ingress: IngressId) -> str:
    return f"{PREFIX}.gateway.{_id(ingress)}.ask"


def index_events(worker: WorkerId) -> str:
    return f"{PREFIX}.index.events.{_id(worker)}"


def index_replay(worker: WorkerId) -> str:
    return f"{PREFIX}.index.replay.{_id(worker)}"


def worker_beat(worker: WorkerId) -> str:
    return f"{PREFIX}.worker.{_id(worker)}.beat"


def decode(worker: WorkerId, verb: str) -> str:
    """verb: reserve | cancel | finish | replay | ack | migrate"""
    return f"{PREFIX}.decode.{_id(worker)}.{_id(verb)}"


def prefill(worker: WorkerId, verb: str) -> str:
    """verb: run | cancel"""
    return f"{PREFIX}.prefill.{_id(worker)}.{_id(verb)}"


def handoff(worker: WorkerId, verb: str) -> str:
    """verb: commit (to a decode worker) | ack | release (to a prefill worker)"""
    return f"{PREFIX}.handoff.{_id(worker)}.{_id(verb)}"


@lru_cache(maxsize=64)
def stream(ingress: IngressId) -> str:
    return f"{PREFIX}.stream.{_id(ingress)}"


def trace(service: str) -> str:
    return f"{PREFIX}.trace.{_id(service)}"


def audit(service: str) -> str:
    return f"{PREFIX}.audit.{_id(service)}"


def purge_ack(service: str) -> str:
    return f"{PREFIX}.purge.ack.{_id(service)}"


def batch_submit(tenant: TenantId) -> str:
    """Where a tenant publishes its batch lines."""
    return f"{PREFIX}.batch.submit.{_id(tenant)}"


def batch_results(tenant: TenantId) -> str:
    """Where a tenant asks for its results."""
    return f"{PREFIX}.batch.results.{_id(tenant)}"


def batch_done(tenant: TenantId) -> str:
    """Where a tenant hears of each result as it comes."""
    return f"{PREFIX}.batch.done.{_id(tenant)}"


def batch_item(tenant: TenantId) -> str:
    return f"{PREFIX}.batch.item.{_id(tenant)}"


ANY_WORKER_BEAT = f"{PREFIX}.worker.*.beat"
ANY_GATEWAY_BEAT = f"{PREFIX}.gateway.*.beat"
ANY_SCHED_BEAT = f"{PREFIX}.sched.*.beat"
ANY_TRACE = f"{PREFIX}.trace.*"
ANY_PURGE_ACK = f"{PREFIX}.purge.ack.*"
ANY_INDEX_EVENTS = f"{PREFIX}.index.events.*"
ANY_BATCH_SUBMIT = f"{PREFIX}.batch.submit.*"
ANY_BATCH_RESULTS = f"{PREFIX}.batch.results.*"
ANY_BATCH_DONE = f"{PREFIX}.batch.done.*"
ANY_BATCH_ITEM = f"{PREFIX}.batch.item.*"


@dataclass(frozen=True, slots=True)
class Hop:
    """One row of the subjects table.

    `kind` is request (request/reply), publish (core NATS) or stream (JetStream). `pattern` is the subject with `*` for
    ids: what permissions are made of. `senders` publish it, `receivers` subscribe to it.
    """

    name: str
    kind: str
    pattern: str
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    message: Any
    reply: Any = None


GATEWAY = ("gateway",)
INGRESS = (*GATEWAY, "batch")
"""Services that hold requests: each has an id, beats, a stream of frames and placement events."""
TENANT = "tenant"
"""Not a service: a NATS user of a tenant, in an account apart."""
ADMIN = "admin"
"""Not a service: the NATS user of the command line on the machine that holds the stack's secrets."""
WORKERS = ("prefill", "decode")
COPIES = (*INGRESS, "scheduler", "prefix-cache-index", *WORKERS)
"""Services that hold something of a request which a purge has to reach, beside policy itself."""
SERVICES = (*INGRESS, "policy", "scheduler", "prefix-cache-index", *WORKERS)
"""The service names of subjects, NATS users and `service.name`: ids, so with hyphens."""

HOPS: tuple[Hop, ...] = (
    Hop(
        "policy.authenticate",
        "request",
        POLICY_AUTHENTICATE,
        GATEWAY,
        ("policy",),
        m.Authenticate,
        m.Identity | m.Refusal,
    ),
    Hop("policy.admit", "request", POLICY_ADMIT, GATEWAY, ("policy",), m.Admit, m.Granted | m.Refusal),
    Hop(
        "policy.admit-tenant",
        "request",
        POLICY_ADMIT_TENANT,
        ("batch",),
        ("policy",),
        m.AdmitTenant,
        m.Granted | m.Refusal,
    ),
    Hop(
        "policy.admin",
        "request",
        POLICY_ADMIN,
        (ADMIN,),
        ("policy",),
        am.KeyCreate
        | am.KeyRevoke
        | am.LimitsChange
        | am.TermsChange
        | am.TenantsQuery
        | am.PurgeStart
        | am.PurgeQuery,
        am.Tenants | am.Purges,
    ),
    Hop(
        "policy.idempotency",
        "request",
        POLICY_IDEMPOTENCY,
        GATEWAY,
        ("policy",),
        i.IdempotencyClaim | i.IdempotencyWrite,
        i.IdempotencyState | i.IdempotencyWritten | m.Refusal,
    ),
    Hop(
        "policy.responses",
        "request",
        POLICY_RESPONSES,
        GATEWAY,
        ("policy",),
        i.IdempotencyClaim
        | i.IdempotencyWrite
        | r.ResponseInput
        | r.ResponseFind
        | r.ResponseCancel
        | r.ResponseDelete,
        i.IdempotencyState | i.IdempotencyWritten | r.ResponseFound | r.ResponseChanged | m.Refusal,
    ),
    Hop(
        "responses.adopt",
        "request",
        RESPONSES_ADOPT,
        ("policy",),
        GATEWAY,
        r.ResponseAdopt,
        r.ResponseAdopted | m.Refusal,
    ),
    Hop("policy.settle", "stream", POLICY_SETTLE, INGRESS, ("policy",), m.Settle),
    Hop(
        "policy.events",
        "publish",
        POLICY_EVENTS,
        ("policy",),
        (*INGRESS, "scheduler", "prefix-cache-index", *WORKERS),
        m.PolicyEvent,
    ),
    Hop("sched.submit", "request", f"{PREFIX}.sched.*.submit", INGRESS, ("scheduler",), m.Submit, m.Queued | m.Refusal),
    Hop("sched.withdraw", "publish", f"{PREFIX}.sched.*.withdraw", INGRESS, ("scheduler",), m.Withdraw),
    Hop(
        "sched.beat",
        "publish",
        ANY_SCHED_BEAT,
        ("scheduler",),
        (*INGRESS, "policy", "scheduler", *WORKERS),
        m.SchedulerBeat,
    ),
    Hop(
        "gateway.event",
        "request",
        f"{PREFIX}.gateway.*.event",
        ("scheduler",),
        INGRESS,
        m.Placed | m.PlacementRefused | m.WorkerLost,
        m.EventsSeen,
    ),
    Hop(
        "gateway.beat",
        "publish",
        ANY_GATEWAY_BEAT,
        INGRESS,
        (*GATEWAY, "policy", "scheduler", *WORKERS),
        m.GatewayBeat,
    ),
    Hop("gateway.ask", "request", f"{PREFIX}.gateway.*.ask", ("policy",), INGRESS, i.IngressAsked, i.IngressHere),
    Hop("index.match", "request", INDEX_MATCH, ("scheduler",), ("prefix-cache-index",), m.Match, m.Matched | m.Refusal),
    Hop("index.extend", "request", INDEX_EXTEND, WORKERS, ("prefix-cache-index",), m.Extend, m.Extended | m.Refusal),
    Hop("index.replay", "publish", f"{PREFIX}.index.replay.*", ("prefix-cache-index",), WORKERS, m.Replay),
    Hop("index.events", "publish", ANY_INDEX_EVENTS, WORKERS, ("prefix-cache-index",), m.BlockEvents),
    Hop(
        "decode.reserve",
        "request",
        f"{PREFIX}.decode.*.reserve",
        ("scheduler",),
        ("decode",),
        m.Reserve,
        m.Reserved | m.Refusal,
    ),
    Hop(
        "decode.cancel",
        "request",
        f"{PREFIX}.decode.*.cancel",
        (*INGRESS, "scheduler"),
        ("decode",),
        m.Cancel,
        m.Cancelled,
    ),
    Hop("decode.finish", "request", f"{PREFIX}.decode.*.finish", INGRESS, ("decode",), m.Finish, m.Finished),
    Hop(
        "decode.replay", "request", f"{PREFIX}.decode.*.replay", INGRESS, ("decode",), m.StreamReplay, m.StreamReplayed
    ),
    Hop("decode.ack", "request", f"{PREFIX}.decode.*.ack", INGRESS, ("decode",), m.FinalAck, m.FinalAcked),
    Hop("decode.migrate", "request", f"{PREFIX}.decode.*.migrate", ("scheduler",), ("decode",), m.Migrate, m.Migrated),
    Hop(
        "prefill.run",
        "request",
        f"{PREFIX}.prefill.*.run",
        ("scheduler",),
        ("prefill",),
        m.PrefillRun,
        m.PrefillAccepted | m.Refusal,
    ),
    Hop(
        "prefill.cancel",
        "request",
        f"{PREFIX}.prefill.*.cancel",
        (*INGRESS, "scheduler"),
        ("prefill",),
        m.Cancel,
        m.Cancelled,
    ),
    Hop("handoff.commit", "publish", f"{PREFIX}.handoff.*.commit", ("prefill",), ("decode",), m.HandoffCommit),
    Hop("handoff.ack", "publish", f"{PREFIX}.handoff.*.ack", ("decode",), ("prefill",), m.HandoffAck),
    Hop("handoff.release", "publish", f"{PREFIX}.handoff.*.release", ("decode",), ("prefill",), m.HandoffRelease),
    Hop(
        "worker.beat",
        "publish",
        ANY_WORKER_BEAT,
        WORKERS,
        ("scheduler", "prefix-cache-index", "policy", *INGRESS, *WORKERS),
        m.WorkerBeat,
    ),
    Hop("stream", "publish", f"{PREFIX}.stream.*", ("decode",), INGRESS, m.StreamFrame),
    Hop("trace", "publish", f"{PREFIX}.trace.*", SERVICES, GATEWAY, m.SpanBatch),
    Hop("purge.order", "publish", PURGE_ORDER, ("policy",), COPIES, m.PurgeOrder),
    Hop("purge.ack", "stream", ANY_PURGE_ACK, COPIES, ("policy",), m.PurgeAck),
    Hop(
        "audit",
        "stream",
        f"{PREFIX}.audit.*",
        SERVICES,
        ("policy",),
        m.AuditRecord,
    ),
    Hop("batch.files", "request", BATCH_FILES, GATEWAY, ("batch",), b.FileRequest, b.FileReply),
    Hop("batch.jobs", "request", BATCH_JOBS, GATEWAY, ("batch",), b.BatchRequest, b.BatchReply),
    Hop("batch.item", "stream", ANY_BATCH_ITEM, ("batch",), ("batch",), b.BatchItem),
    # Raw JSON: tenants use plain NATS clients.
    Hop("batch.submit", "stream", ANY_BATCH_SUBMIT, (TENANT,), ("batch",), bytes),
    Hop("batch.results", "request", ANY_BATCH_RESULTS, (TENANT,), ("batch",), bytes, bytes),
    Hop("batch.done", "publish", ANY_BATCH_DONE, ("batch",), (TENANT,), bytes),
)
"""The whole table. In permissions `audit.<service>`, `trace.<service>` and `purge.ack.<service>` are narrowed to the
sender's own name."""
