"""The steps of a reservation that need no state of the worker: checks, what the batcher is asked, what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.decode.held import Held
from shared.contracts.errors import ContextExceeded, Forbidden, InvalidInput, ProtocolError
from shared.contracts.grants import Grant
from shared.contracts.messages import Reserve, Reserved
from shared.engine.batcher import Batcher, Reservation
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import LENGTH, STOP
from shared.engine.worker_engine import WorkerFacts
from shared.engine.worker_shell import WorkerShell
from shared.kv.block_table import BlockTable
from shared.kv.handoff import Sink
from shared.kv.layout import PoolLayout
from shared.telemetry import attributes as a


@dataclass(frozen=True, slots=True)
class Accepted:
    """The batcher's yes. `awaiting`: choice 0 waits for KV, and its blocks are pinned for the pulls."""

    num_cached_tokens: int
    tables: tuple[BlockTable, ...]
    awaiting: bool
    arriving: bool = False  # choice 0 is to wait for KV, and its blocks are on their way; see `settle`


def require_sane(message: Reserve, grant: Grant, facts: WorkerFacts) -> None:
    """Refuse what no waiting can make right.

    Raises:
        Forbidden: the grant is another request's.
        ProtocolError: the parts of the message contradict each other.
        ContextExceeded: prompt and output do not fit the model's context.
    """
    max_positions = facts.max_positions
    if grant.request_id != message.attempt.request_id:
        raise Forbidden("the grant is another request's", code="grant_invalid")
    num_tokens, prompt = len(message.token_ids) // 4, message.num_prompt_tokens
    if not message.sampling or not 0 < prompt <= num_tokens:
        raise ProtocolError("a reservation needs a prompt and at least one choice")
    if num_tokens > prompt and len(message.sampling) > 1:
        raise ProtocolError("only a request of one choice can come with output tokens")
    for sampling in message.sampling:
        if prompt + sampling.max_tokens > max_positions:
            raise ContextExceeded(f"{prompt} + {sampling.max_tokens} tokens exceed the context of {max_positions}")


def within_pool(message: Reserve, layout: PoolLayout) -> Reserve:
    """The request with outputs no longer than the pool bears, where nobody asked for that length.

    The last token of an output is never computed, so takes no slot.
    """
    slots = min(n * group.block_size for n, group in zip(layout.num_blocks, layout.groups, strict=True))
    most = slots + 1 - message.num_prompt_tokens
    sampling = tuple(
        msgspec.structs.replace(choice, max_tokens=most)
        if choice.open_ended and 0 < most < choice.max_tokens
        else choice
        for choice in message.sampling
    )
    return message if sampling == message.sampling else msgspec.structs.replace(message, sampling=sampling)


def finish_of_resumed(held: Held, eos_token_ids: frozenset[int]) -> str:
    """The finish reason of a request whose output was complete when it came; empty when there is more to sample."""
    sampling = held.reserve.sampling[0]
    last = held.committed[-1] if held.committed else -1
    if last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos):
        return STOP
    return LENGTH if len(held.committed) >= sampling.max_tokens else ""


def specs_of(held: Held, eos_token_ids: frozenset[int]) -> list[SequenceSpec]:
    """One sequence per choice; the first one waits for KV when a prefill worker was named."""
    message, grant = held.reserve, held.grant
    tags = tuple(g.tags for g in sorted(message.tags, key=lambda g: g.group))
    return [
        SequenceSpec(
            seq_id=choice.seq_id,
            token_ids=held.token_ids,
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            tags=tags,
            tenant=grant.tenant,
            weight=grant.weight,
            klass=grant.klass,
            scope_generation=grant.scope.generation,
            retention_s=grant.retention_s,
            await_kv=bool(message.prefill_worker) and i == 0 and sampling.prompt_logprobs < 0,
            follows="" if i == 0 else held.choices[0].seq_id,
        )
        for i, (choice, sampling) in enumerate(zip(held.choices, message.sampling, strict=True))
    ]


def accept(batcher: Batcher, specs: Sequence[SequenceSpec]) -> Accepted:
    """On the planner thread: all choices or none.

    Raises:
        ReservationRefused: there is no room, or never will be.
        InvalidInput: more choices than run at once (param `n`).
    """
    most = batcher.config.max_num_seqs
    if len(specs) > most:
        raise InvalidInput(f"n: this model's workers run at most {most} choices at once", param="n")
    batcher.require_possible(specs)
    if len(specs) > 1:
        batcher.require_room(specs)
    accepted: list[Reservation] = []
    try:
        for spec in specs:
            accepted.append(batcher.reserve(spec))
    except Exception:
        for spec in specs[: len(accepted)]:
            batcher.cancel(spec.seq_id)
        raise
    first, spec = accepted[0], specs[0]
    if first.arriving and spec.await_kv:
        return Accepted(first.num_cached_tokens, first.tables, awaiting=False, arriving=True)
    return _opened(batcher, spec, first)


def settle(batcher: Batcher, spec: SequenceSpec) -> Accepted:
    """On the planner thread: what became of a reservation whose blocks were on their way.

    One that has none yet, or lost them again, computes its prompt here as soon as it has some.
    """
    held = batcher.reservation(spec.seq_id)
    if held is None:
        return Accepted(0, (), awaiting=False)
    if not all(map(len, held.tables)):
        batcher.release(spec.seq_id)
        return Accepted(0, held.tables, awaiting=False)
    return _opened(batcher, spec, held)


def _opened(batcher: Batcher, spec: SequenceSpec, held: Reservation) -> Accepted:
    awaiting = spec.await_kv and held.num_cached_tokens < len(spec.token_ids) - 1
    if awaiting:
        batcher.pin(spec.seq_id)
    elif spec.await_kv:
        batcher.release(spec.seq_id)
    return Accepted(held.num_cached_tokens, held.tables, awaiting)


def sink_of(held: Held, shell: WorkerShell) -> Sink:
    """The hand-off into a fresh reservation: all but the last token of what it came with."""
    facts = shell.core.facts
    return Sink(
        shell.worker,
        held.attempt,
        held.reserve.prefill_worker,
        held.lease_token,
        facts.fingerprint,
        tuple(group.block_size for group in facts.layout.groups),
        held.num_cached_tokens,
        len(held.token_ids) - 1,
    )


def reserved(held: Held, shell: WorkerShell, *, already_running: bool) -> Reserved:
    """The answer to the scheduler: what of the prompt is here, pulled blocks included."""
    here = held.sink.contiguous if held.sink is not None else held.num_cached_tokens
    return Reserved(
        incarnation=shell.incarnation,
        num_cached_tokens=here,
        lease_token=held.lease_token,
        fingerprint=shell.core.facts.fingerprint,
        already_running=already_running,
    )


def end_span(held: Held) -> None:
    """Close `decode.run` with what the request came to. Idempotent: a span ends once."""
    if not held.span.is_recording():
        return
    first = held.choices[0]
    ready = held.kv_ready_at or held.reserved_at
    held.span.set_attributes(
        {
            a.PATH: held.path,
            a.REASON: held.local_reason,
            a.COMPLETION_TOKENS: sum(c.timings.count for c in held.choices),
            a.CACHED_TOKENS: held.num_cached_tokens,
            a.PREFILL_S: max(0.0, first.first_at - ready) if first.timings.count else 0.0,
            a.DECODE_S: first.last_at - first.first_at,
            a.WORKER_QUEUE_S: max(0.0, first.started_at - held.reserved_at) if first.started_at else 0.0,
            a.PREEMPTIONS: sum(c.preemptions for c in held.choices),
            a.DRAFTED_TOKENS: sum(c.drafted for c in held.choices),
            a.ACCEPTED_TOKENS: sum(c.accepted for c in held.choices),
            a.FINISH: ",".join(c.ended for c in held.choices),
            **first.timings.summary(),
        }
    )
    held.span.end()
