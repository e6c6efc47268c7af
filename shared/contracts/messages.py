"""Every message of the subjects table. Each docstring names sender → receiver and subject.

A new hop begins here, in `subjects.py` and in `tests/contracts` (golden bytes).
"""

from __future__ import annotations

import msgspec

from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import (
    Incarnation,
    IngressId,
    RequestId,
    ScopeGeneration,
    TenantId,
    Term,
    WorkerId,
)
from shared.contracts.message import Message
from shared.contracts.parts import (
    AttemptOutput,
    AttemptProgress,
    ClassRoom,
    ComputeRow,
    ExtendedRun,
    ExtendRun,
    GroupBlocks,
    GroupTags,
    HeldAttempt,
    Holder,
    ItlTarget,
    KvEnd,
    KvLink,
    SpanRecord,
    StepModel,
    StreamRecord,
    TenantLoad,
    Totals,
)
from shared.contracts.quota import Quota
from shared.contracts.sampling import SamplingParams


class Refusal(Message, frozen=True, kw_only=True):
    """The receiver's no to a request/reply: status, reason and when to come back. Never an error of the hop."""

    error: ErrorInfo
    never: bool = False  # no retry anywhere can help (for example: larger than the pool)
    quota: Quota | None = None  # of the tenant that was refused, where policy knows it


# ---------------------------------------------------------------------------------------------- policy


class Authenticate(Message, frozen=True, kw_only=True):
    """gateway → policy, `policy.authenticate`. The key itself never leaves the gateway."""

    key_hash: bytes  # SHA-256 of the API key


class Identity(Message, frozen=True, kw_only=True):
    """policy → gateway: whose key it is. Cached by the gateway for at most 5 s, ended early by a PolicyEvent."""

    tenant: TenantId
    key_id: str
    admin: bool = False
    default_max_tokens: int = 1024
    limits: Limits = Limits()
    version: int = 0
    models: tuple[str, ...] = ()  # it may use; empty = every one
    quota: Quota | None = None  # of a tenant or key with limits that `has_rates` finds
    key_max_parallel: int = 0  # requests of this key at once; 0 = no limit of its own
    retention_s: int = -1  # how long what the tenant stores may be kept, as of grants; -1: as asked

    @property
    def has_rates(self) -> bool:
        """Whether there is a limit of which answers tell how much is left."""
        limits = self.limits
        own = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_parallel, self.key_max_parallel)
        return any(own)


class Admit(Message, frozen=True, kw_only=True):
    """gateway → policy, `policy.admit`: may this request run, and reserve its quota in one atomic step."""

    request_id: RequestId
    key_hash: bytes
    model: str
    num_prompt_tokens: int
    max_tokens: int  # per choice
    choices: int = 1
    klass: str = ""  # asked class; policy decides
    ingress_id: IngressId = IngressId("")  # who holds the request: its reservation goes when this ingress is lost
    counts_only: bool = False  # no generation: it is one of the requests a minute, holds nothing and is not settled
    salt: bytes = b""  # narrows the scope


class AdmitTenant(Message, frozen=True, kw_only=True):
    """batch → policy, `policy.admit-tenant`: as Admit, for an ingress that knows the tenant by other means than a key.

    `request_id` is derived from the item, so asking again after a crash holds nothing twice. It takes nothing from the
    tenant's limits a minute: batch work has a limit of its own, the enqueued tokens.
    """

    request_id: RequestId
    tenant: TenantId
    model: str
    num_prompt_tokens: int
    max_tokens: int
    choices: int = 1
    klass: str = "batch"
    salt: bytes = b""


class Granted(Message, frozen=True, kw_only=True):
    """policy → ingress: yes, signed."""

    grant: SignedGrant
    default_max_tokens: int = 0  # the tenant's, of a request that names none; told in answer to AdmitTenant
    quota: Quota | None = None  # this request included; not told in answer to AdmitTenant


class Settle(Message, frozen=True, kw_only=True):
    """gateway → policy, JetStream `policy.settle`: what the request came to. Cumulative, stamped with the epoch.

    A higher epoch replaces an earlier row, an equal one is a no-op; compute rows are additive per (attempt, worker).
    """

    attempt: Attempt
    grant: SignedGrant
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    finish: str = ""
    compute: tuple[ComputeRow, ...] = ()


class PolicyEvent(Message, frozen=True, kw_only=True):
    """policy → all, `policy.events`: a key was revoked, a limit or a scope generation changed."""

    kind: str  # revoked | changed | scope_raised
    tenant: TenantId
    key_id: str = ""
    generation: ScopeGeneration = ScopeGeneration(0)
    version: int = 0


# ---------------------------------------------------------------------------------------------- scheduler


class Submit(Message, frozen=True, kw_only=True):
    """ingress → scheduler, `sched.<pool>.submit`. Idempotent: the same attempt again is answered alike.

    `token_ids` is the prompt plus the tokens already committed in earlier epochs; `num_prompt_tokens` says where the
    prompt ends, so output sequence numbers go on at `len(token_ids) - num_prompt_tokens`.
    """

    attempt: Attempt
    ingress_id: IngressId
    grant: SignedGrant
    token_ids: bytes
    num_prompt_tokens: int
    sampling: tuple[SamplingParams, ...]  # one per choice
    age_s: float = 0.0  # since the client's request arrived
    numerics: str = ""  # of the earlier epochs' worker; empty at first


class Queued(Message, frozen=True, kw_only=True):
    """scheduler → ingress: taken. Everything after that comes as events and frames."""

    term: Term
    position: int = 0
    predicted_ttft_s: float = 0.0


class Withdraw(Message, frozen=True, kw_only=True):
    """ingress → scheduler, `sched.<pool>.withdraw`: the client has gone, or will get no more. What waits here of this
    epoch or an earlier one is not placed any more, and what is being placed is cancelled.

    At most once: where it is lost, beats that no longer list the request say the same, later.
    """

    attempt: Attempt


class SchedulerBeat(Message, frozen=True, kw_only=True):
    """scheduler → all, `sched.<pool>.beat`. A new term makes ingresses resend what has no first token."""

    pool: str
    term: Term
    scheduler_id: str
    queued: int = 0
    running: int = 0
    queued_by_class: dict[str, int] = msgspec.field(default_factory=dict)  # classes with none waiting are left out
    tenants: tuple[TenantLoad, ...] = ()  # of which any waits, those with most waiting, at most 16


class Placed(Message, frozen=True, kw_only=True):
    """scheduler → ingress, `gateway.<id>.event`: where the attempt runs and why."""

    number: int  # per ingress, resent until seen
    attempt: Attempt
    term: Term
    decode_worker: WorkerId
    prefill_worker: WorkerId = WorkerId("")
    path: str = "local"  # local | handed_off
    reason: str = ""
    local_s: float = 0.0  # both estimates, seconds
    handed_off_s: float = 0.0
    queue_s: float = 0.0
    numerics: str = ""


class PlacementRefused(Message, frozen=True, kw_only=True):
    """scheduler → ingress, `gateway.<id>.event`: queued, but can't be placed (for ever, or in its budget)."""

    number: int
    attempt: Attempt
    error: ErrorInfo


class WorkerLost(Message, frozen=True, kw_only=True):
    """scheduler → ingress, `gateway.<id>.event`: a worker is gone; raise the epoch of what it held."""

    number: int
    worker: WorkerId
    incarnation: Incarnation
    reason: str = ""


class EventsSeen(Message, frozen=True, kw_only=True):
    """ingress → scheduler, in reply to an event: everything up to `number` was seen."""

    number: int


# ---------------------------------------------------------------------------------------------- prefix cache index


class Match(Message, frozen=True, kw_only=True):
    """scheduler → index, `index.match`: tags of the prompt's leading full blocks, and who holds how many of them."""

    grant: SignedGrant
    token_ids: bytes


class Matched(Message, frozen=True, kw_only=True):
    """index → scheduler. Capped at floor((n - 1) / block_size) blocks."""

    scope_generation: ScopeGeneration
    tags: tuple[GroupTags, ...] = ()
    holders: tuple[Holder, ...] = ()


class Extend(Message, frozen=True, kw_only=True):
    """worker → index, `index.extend`: committed full blocks that want tags. Batched and asynchronous."""

    worker: WorkerId
    incarnation: Incarnation
    runs: tuple[ExtendRun, ...]


class Extended(Message, frozen=True, kw_only=True):
    """index → worker: one entry per run asked for."""

    runs: tuple[ExtendedRun, ...]


class BlockEvents(Message, frozen=True, kw_only=True):
    """worker → index, `index.events.<worker>`, numbered from 1 in each incarnation; a gap → replay."""

    worker: WorkerId
    incarnation: Incarnation
    number: int
    stored: tuple[GroupTags, ...] = ()
    removed: tuple[GroupTags, ...] = ()
    snapshot: bool = False  # `stored` is everything the worker holds


class Replay(Message, frozen=True, kw_only=True):
    """index → worker, `index.replay.<worker>`: send a snapshot; events after `number` are lost to me."""

    number: int


# ---------------------------------------------------------------------------------------------- workers


class Reserve(Message, frozen=True, kw_only=True):
    """scheduler → one decode worker, `decode.<worker>.reserve`: the whole request.

    Accepted means: blocks pinned, and finished without the scheduler, by the worker's own prefill if no KV comes.
    """

    attempt: Attempt
    term: Term
    ingress_id: IngressId
    grant: SignedGrant
    token_ids: bytes
    num_prompt_tokens: int
    sampling: tuple[SamplingParams, ...]
    tags: tuple[GroupTags, ...] = ()
    prefill_worker: WorkerId = WorkerId("")  # empty: local
    lease_s: float = 10.0


class Reserved(Message, frozen=True, kw_only=True):
    """decode worker → scheduler: yes, with the true hit."""

    incarnation: Incarnation
    num_cached_tokens: int
    lease_token: bytes  # 16 random bytes; needed to read this attempt's KV over TCP, and echoed in commits
    fingerprint: str = ""
    already_running: bool = False  # a lower attempt was re-stamped and goes on; no prefill leg is needed


class PrefillRun(Message, frozen=True, kw_only=True):
    """scheduler → one prefill worker, `prefill.<worker>.run`: KV for `token_ids`, the prompt without its last."""

    attempt: Attempt
    term: Term
    grant: SignedGrant
    token_ids: bytes
    decode_worker: WorkerId
    lease_token: bytes
    decode_incarnation: Incarnation
    first_token: int = 0  # the decode worker already holds [0, first_token)
    tags: tuple[GroupTags, ...] = ()
    lease_s: float = 10.0


class PrefillAccepted(Message, frozen=True, kw_only=True):
    """prefill worker → scheduler."""

    incarnation: Incarnation
    num_cached_tokens: int = 0
    fingerprint: str = ""


class Cancel(Message, frozen=True, kw_only=True):
    """ingress or scheduler → one worker, `{decode,prefill}.<worker>.cancel`: end this and older attempts."""

    attempt: Attempt
    reason: str = ""


class Cancelled(Message, frozen=True, kw_only=True):
    """worker → asker. `held` is false when the worker did not hold the attempt."""

    held: bool
    totals: Totals | None = None


class Finish(Message, frozen=True, kw_only=True):
    """ingress → decode worker, `decode.<worker>.finish`: a stop string matched; keep `num_tokens` output tokens."""

    attempt: Attempt
    choice: int
    num_tokens: int


class Finished(Message, frozen=True, kw_only=True):
    """decode worker → ingress: the account cut at `num_tokens`; the rest is booked as waste."""

    held: bool
    totals: Totals | None = None


class StreamReplay(Message, frozen=True, kw_only=True):
    """ingress → decode worker, `decode.<worker>.replay`: I miss tokens from `from_seq` on."""

    attempt: Attempt
    choice: int
    from_seq: int


class StreamReplayed(Message, frozen=True, kw_only=True):
    """decode worker → ingress: the records again; empty with held=False when the worker has forgotten the attempt."""

    held: bool
    records: tuple[StreamRecord, ...] = ()


class FinalAck(Message, frozen=True, kw_only=True):
    """ingress → decode worker, `decode.<worker>.ack`: these finals arrived; forget them."""

    attempts: tuple[Attempt, ...]


class FinalAcked(Message, frozen=True, kw_only=True):
    """decode worker → ingress."""


class Migrate(Message, frozen=True, kw_only=True):
    """scheduler → decode worker, `decode.<worker>.migrate`: give this attempt to another worker."""

    attempt: Attempt
    term: Term
    target: WorkerId


class Migrated(Message, frozen=True, kw_only=True):
    """decode worker → scheduler: whether the attempt moved."""

    moved: bool
    totals: Totals | None = None


class HandoffCommit(Message, frozen=True, kw_only=True):
    """prefill → decode worker, `handoff.<decode worker>.commit`. Cumulative and numbered from 1.

    Commit `number` names every finished block of [first_token, num_tokens); a receiver that missed earlier ones needs
    nothing else. A partial tail block is named only in the last commit, with its valid length; the rest of it is zero.
    """

    attempt: Attempt
    source: WorkerId
    source_incarnation: Incarnation
    number: int
    lease_token: bytes
    fingerprint: str
    pool: str  # file name of the source's pool inside the shared KV folder
    num_tokens: int  # KV of [0, num_tokens) is final at the source
    groups: tuple[GroupBlocks, ...] = ()
    last: bool = False
    cached_tokens: int = 0
    error: ErrorInfo | None = None  # prefill failed: go on alone
    kv: KvEnd = KvEnd()  # where the source's pool lies


class HandoffAck(Message, frozen=True, kw_only=True):
    """decode → prefill worker, `handoff.<prefill worker>.ack`: pulled and checked up to `num_tokens`."""

    attempt: Attempt
    worker: WorkerId
    number: int  # of the highest commit taken
    num_tokens: int
    done: bool = False
    resend: bool = False  # a commit is missing: send the newest again


class HandoffRelease(Message, frozen=True, kw_only=True):
    """decode → prefill worker, `handoff.<prefill worker>.release`: the source's blocks are no longer needed."""

    attempt: Attempt
    worker: WorkerId
    reason: str = ""


class WorkerBeat(Message, frozen=True, kw_only=True):
    """worker → scheduler, index and peers, `worker.<id>.beat`, once a second and on change."""

    worker: WorkerId
    role: str  # prefill | decode
    pool: str  # model pool
    incarnation: Incarnation
    boot_id: str
    host: str
    number: int
    term: Term = Term(0)  # highest leader's term seen
    free_blocks: tuple[int, ...] = ()  # per group, cached but unreferenced ones included
    total_blocks: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()  # per group
    token_budget: int = 0  # most tokens in one step
    running: int = 0
    waiting: int = 0
    max_sequences: int = 0
    queue_tokens: int = 0  # prompt tokens not yet computed
    attempts: tuple[AttemptProgress, ...] = ()
    step_model: StepModel = StepModel()
    numerics: str = ""
    fingerprint: str = ""
    model_digest: str = ""
    kv_pool: str = ""  # file name of its pool
    draining: bool = False
    fake: bool = False
    token_bytes: tuple[int, ...] = ()  # KV of one token, per group
    held_back: tuple[int, ...] = ()  # free blocks no newcomer gets: to grow into, and for those preempted; per group
    revoked: tuple[Attempt, ...] = ()  # held, not begun, and without blocks: may be placed elsewhere
    preemptions: int = 0  # in this incarnation
    itl_target: ItlTarget = ItlTarget()  # that its steps keep
    kv: KvEnd = KvEnd()  # where its pool lies
    links: tuple[KvLink, ...] = ()  # to the workers it pulled from of late
    rooms: tuple[ClassRoom, ...] = ()  # what a newcomer of each of CLASSES can have, what lower ones hold included
    classes: tuple[str, ...] = ()  # it takes requests of; none named: of all
    stalled: bool = False  # its engine has ended no step for longer than any takes
    outputs: tuple[AttemptOutput, ...] = ()  # of attempts held, and of those that ended in the last seconds
    class_tokens: tuple[int, ...] = ()  # queue_tokens by class, one for each of CLASSES


class StreamFrame(Message, frozen=True, kw_only=True):
    """decode worker → ingress, `stream.<ingress>`: one a step with the records of all that ingress's requests.

    Once a second a frame without records lists the attempts held with their next sequence numbers, which shows lost
    tails. Frames are split at MAX_MESSAGE_BYTES.
    """

    worker: WorkerId
    incarnation: Incarnation
    number: int
    records: tuple[StreamRecord, ...] = ()
    held: tuple[HeldAttempt, ...] = ()
    listing: bool = False  # `held` is complete


class GatewayBeat(Message, frozen=True, kw_only=True):
    """ingress → workers, `gateway.<id>.beat`: alive, and these attempts are mine; workers drop the others' work."""

    ingress_id: IngressId
    number: int
    requests: tuple[RequestId, ...] = ()


# ---------------------------------------------------------------------------------------------- traces


class SpanBatch(Message, frozen=True, kw_only=True):
    """service → gateways, `trace.<service>`: finished spans for `./baton trace`. Lossy by design."""

    service: str
    spans: tuple[SpanRecord, ...]


# ---------------------------------------------------------------------------------------------- durable (JetStream)


class PurgeOrder(Message, frozen=True, kw_only=True):
    """policy → owners of copies, `purge.order`: end what runs, overwrite and forget what the tenant's generations below
    `generation` left. Kept by policy and published again until every owner has acknowledged, so it may come twice.
    """

    purge_id: str
    tenant: TenantId
    generation: ScopeGeneration
    reason: str = ""
    ordered_s: float = 0.0  # unix seconds
    cache_only: bool = False  # what the tenant stored on purpose stays: responses, keyed answers, files, batches


class PurgeAck(Message, frozen=True, kw_only=True):
    """owner → policy, JetStream `purge.ack.<service>`: nothing of it is left here.

    With an empty `purge_id`: the pools of the workers in `wiped` are gone, whatever was asked of them.
    """

    purge_id: str
    owner: str  # id of a process, or name of a service whose processes share what they keep
    counts: dict[str, int] = msgspec.field(default_factory=dict)  # of what was taken, by kind
    service: str = ""
    wiped: tuple[WorkerId, ...] = ()


class AuditRecord(Message, frozen=True, kw_only=True):
    """service → audit chain, JetStream `audit.<service>`: who did what to whom; never prompt text."""

    service: str
    number: int
    action: str
    tenant: TenantId = TenantId("")
    subject: str = ""
    wall_time_s: float = 0.0
