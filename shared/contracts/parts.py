"""Structs inside messages: blocks, tags, accounts, stream records, spans. None crosses the bus by itself."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.grants import SignedGrant
from shared.contracts.ids import BlockGeneration, BlockTag, ScopeGeneration, TenantId, WorkerId


class BlockRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pool block of one layer group at one moment of its life."""

    block_id: int
    generation: BlockGeneration
    digest: bytes = b""  # XXH3-128 of the whole span, 16 bytes; empty where none is needed


class GroupBlocks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks of one layer group, in position order."""

    group: int
    first_position: int  # index of the first block in the sequence's block table
    blocks: tuple[BlockRef, ...] = ()


class GroupTags(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tags of the leading full blocks of a prompt in one layer group."""

    group: int
    tags: tuple[BlockTag, ...] = ()


class Totals(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's account of one attempt: token counts, and seconds of engine time, which add up over its requests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0
    received_tokens: int = 0  # KV that came by hand-off
    wasted_tokens: int = 0  # computed and thrown away, or computed again
    checksum: bytes = b""  # BLAKE2b-128 over the completion's token ids (u32 LE)
    prefill_s: float = 0.0  # its share, by tokens, of the steps that computed tokens it came with
    decode_s: float = 0.0  # the same for tokens sampled here
    bytes_pulled: int = 0
    first_token_s: float = 0.0  # wall time from reservation to first sampled token
    preemptions: int = 0  # how often its blocks were taken; what was computed again is in `wasted_tokens`
    drafted_tokens: int = 0  # guesses that steps verified; wrong ones are in `wasted_tokens`
    accepted_tokens: int = 0  # those that were right and became text
    predicted_tokens: int = 0  # guesses that came from the request's prediction
    predicted_right_tokens: int = 0  # those that were right and are in the completion


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """One account of several choices: prompt and checksum of the first, everything else added up."""
    parts = list(parts)
    if not parts:
        return Totals()
    first = parts[0]
    return Totals(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        completion_tokens=sum(t.completion_tokens for t in parts),
        computed_tokens=sum(t.computed_tokens for t in parts),
        received_tokens=sum(t.received_tokens for t in parts),
        wasted_tokens=sum(t.wasted_tokens for t in parts),
        checksum=first.checksum if len(parts) == 1 else b"",
        prefill_s=sum(t.prefill_s for t in parts),
        decode_s=sum(t.decode_s for t in parts),
        bytes_pulled=sum(t.bytes_pulled for t in parts),
        first_token_s=first.first_token_s,
        preemptions=sum(t.preemptions for t in parts),
        drafted_tokens=sum(t.drafted_tokens for t in parts),
        accepted_tokens=sum(t.accepted_tokens for t in parts),
        predicted_tokens=sum(t.predicted_tokens for t in parts),
        predicted_right_tokens=sum(t.predicted_right_tokens for t in parts),
    )


class StreamRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice's news. Sequence numbers count output tokens of the choice from 0 over all attempts."""

    attempt: Attempt
    choice: int
    first_seq: int
    token_ids: bytes = b""
    finish: str = ""  # "" | stop | length | cancelled | error
    totals: Totals | None = None  # with `finish`
    error: ErrorInfo | None = None  # with finish == "error"
    logprobs: bytes = b""  # of token_ids, as `logprobs.pack_logprobs`; empty when none were asked for
    prompt_logprobs: bytes = b""  # with the choice's first record: of the prompt's tokens but the first


class HeldAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt a worker holds, and the next sequence number it will send for each choice."""

    attempt: Attempt
    next_seq: tuple[int, ...] = ()


class AttemptProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt in a beat. `progress` is counted by the engine thread: it stands still when the engine does."""

    attempt: Attempt
    progress: int
    computed_tokens: int = 0


class AttemptOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens a decode worker has made for an attempt, of all choices together; `ended`: no more come."""

    attempt: Attempt
    num_tokens: int
    ended: bool = False


class TenantLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's requests in one class of a pool: those that wait, being placed included, and those that run."""

    tenant: TenantId
    klass: str
    weight: float
    waiting: int = 0
    running: int = 0


class StepModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coefficients of the one step-time model, seconds: T = max(floor, base + token·n + sequence·B) + context·C.

    n counts a step's tokens, B its sequences, and C the positions those tokens attend to, summed over the tokens: a
    decode row attends to its sequence's length, n tokens from position `start` to n·start + n(n + 1)/2.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    floor_s: float = 0.0


class ClassRoom(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a newcomer of a class can have on a worker, what lower classes would give up for it included."""

    sequences: int = 0
    blocks: tuple[int, ...] = ()  # per layer group


class ItlTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long a step may take while sequences decode; all 0: as long as it does.

    `least_s` or, where that is longer, a multiple of what a step takes in which each live sequence decodes: `times`,
    and `times_each` more for each of them.
    """

    least_s: float = 0.0  # seconds
    times: float = 0.0
    times_each: float = 0.0


class KvEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a worker's pool lies, and by which ways its blocks may be read. Places and networks only compare."""

    place: str = ""  # of the folder of its pool file: workers of one place map each other's pools
    network: str = ""  # that it lives in: loopback addresses hold within one
    address: str = ""  # tcp://host:port, or tls://, where it serves its blocks; empty: nowhere
    transfer: str = "auto"  # what its setting kv.transfer allows it to pull by


UNKNOWN_END = KvEnd()
"""Of a worker that has not said."""


class KvLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """How pulls from one worker went of late, as the worker that pulled measured it."""

    worker: WorkerId
    path: str  # shared_memory | cuda_ipc | tcp
    bytes_s: float = 0.0  # 0: nothing came
    failed: bool = False  # the last pull did not reach it: not to be tried again for a while


class ComputeRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Compute one worker spent on one attempt; additive in the ledger."""

    worker: WorkerId
    attempt: Attempt
    totals: Totals


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much of a chain a worker holds, in leading blocks per layer group."""

    worker: WorkerId
    blocks: tuple[int, ...]


class ExtendRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Full blocks to be tagged: they follow `parent` (or, with an empty parent, start at position 0)."""

    attempt: Attempt
    group: int
    grant: SignedGrant
    token_ids: bytes  # of the new blocks only, whole blocks
    blocks: tuple[BlockRef, ...]  # without digests; block id -1 where a block only leads to the others
    parent: BlockTag = BlockTag(b"")


class ExtendedRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tags for one run, in order; empty with `error` when the run was refused."""

    tags: tuple[BlockTag, ...] = ()
    scope_generation: ScopeGeneration = ScopeGeneration(0)
    error: ErrorInfo | None = None


class SpanRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One finished OpenTelemetry span. Ids in hex, times in unix nanoseconds; attributes never hold prompt text.

    Gateways keep tens of thousands of them, through which the garbage collector need not look: they hold plain values.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    status: str = ""  # "" | ok | error
    attributes: dict[str, str | int | float | bool] = {}
    events: tuple[tuple[str, int], ...] = ()  # (name, unix ns)
    links: tuple[str, ...] = ()  # trace ids
