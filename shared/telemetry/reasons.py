"""Why a request went as it did: the decisions in a span's attributes, as sentences. Pure.

The terminal and the console page both print these, so they never tell two stories. What a reason's word means is said
here once; a word nobody wrote a sentence for is shown as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry.units import count, seconds, size

LOCAL_WORDS = {
    "estimate": "the smaller of both estimates",
    "prompt_logprobs": "log-probabilities of the prompt are wanted, which only its own worker can tell",
    "one_token": "the prompt is one token, so there is nothing to hand off",
    "cached": "the decode worker holds all of the prompt but its last token",
    "no_prefill_worker": "no prefill worker could begin at once",
    "no_kv_path": "no prefill worker that could begin can be reached for its KV",
    "prefill_refused": "the prefill worker refused it",
    "prefill_timeout": "the prefill worker did not answer",
    "prefill_lost": "the prefill worker was lost",
    "running": "its decode worker runs it already",
    "adopted": "a new leader found it on its decode worker",
}
"""Why a prompt was computed by the decode worker itself."""
HANDOFF_WORDS = {
    "digest_mismatch": "a block arrived damaged",
    "fingerprint_mismatch": "the two workers do not have the same model or KV layout",
    "placed_locally": "the scheduler placed it locally after all",
    "prefill_lease": "nothing came from the prefill worker for its lease",
    "prefill_died": "the prefill worker died",
    "prefill_restarted": "the prefill worker was restarted",
    "prefill_failed": "the prefill worker gave up",
    "pool_unreadable": "the prefill worker's KV pool could not be read",
    "pull_failed": "copying the KV failed",
    "transfer_unreachable": "the prefill worker could not be reached over TCP",
    "transfer_refused": "the prefill worker refused to send its KV",
    "transfer_closed": "the connection to the prefill worker broke",
    "transfer_timed_out": "the KV came too slowly",
    "gap": "the source left out blocks",
    "wrong_length": "the source named another length",
    "wrong_groups": "the source named other layer groups",
    "closed": "the request ended first",
}
"""Why a hand-off was given up."""
CODE_WORDS = {
    "requests_per_minute": "the tenant's requests a minute are used up",
    "tokens_per_minute": "the tenant's tokens a minute are used up",
    "rate_limit_exceeded": "the tenant's limit is used up",
    "concurrency_limit_exceeded": "as many requests of the tenant or its key run as may at once",
    "max_parallel": "as many requests of the tenant or its key run as may at once",
    "request_too_large": "the request is larger than is allowed",
    "context_length_exceeded": "prompt and output do not fit the model's context",
    "model_not_found": "the model is not served, or not open to this tenant",
    "invalid_api_key": "the API key is not valid",
    "too_many_keys": "too many unknown API keys came from one address",
    "invalid_value": "a field of the request cannot be run as it is",
    "invalid_json": "the body is not a JSON object",
    "unknown_parameter": "the body holds a field nobody knows",
    "request_timeout": "the body did not arrive in time",
    "idempotency_key_reused": "its Idempotency-Key stands for another request",
    "stream_not_found": "nobody knows the stream it wanted to go on with",
    "previous_response_not_found": "the response it wanted to go on from is not there",
    "previous_response_not_ended": "the response it wanted to go on from has not ended well",
    "storage_limit_exceeded": "its tenant stores no more responses",
    "superseded": "another gateway took the request over",
    "replayed": "the run of an earlier request with this Idempotency-Key answered it",
    "internal_error": "something failed in Baton itself",
    "protocol_error": "a message between services was broken",
    "overloaded": "there is no capacity, or the wait would be longer than is bearable",
    "queue_full": "the queue is full",
    "slo": "the wait was predicted to be longer than is bearable",
    "deadline_exceeded": "the request's time budget was spent",
    "unavailable": "a service did not answer",
    "no_responders": "a service was not there",
    "client_gone": "the client left",
    "slow_client": "the client read too slowly",
    "worker_lost": "too many workers were lost under it",
    "shutting_down": "the gateway was shutting down",
    "expired": "its time was over",
    "cancelled": "it was cancelled",
    "revoked": "the reservation was taken back",
    "conflict": "a newer attempt or leader was seen",
    "forbidden": "the key or grant does not allow it",
    "grant_expired": "the grant had expired",
    "grant_invalid": "the grant is not for this request",
    "ingress_silent": "its gateway fell silent while it waited",
    "unlisted": "its gateway no longer lists it",
    "engine_error": "the model made no usable output",
    "worker_stopping": "its worker was stopped",
    "message_too_large": "what it makes is larger than the queue takes",
    "checksum_mismatch": "the output did not match the worker's account of it",
    "purged": "what it was made of was purged",
    "no_room": "no decode worker had blocks or a slot free",
    "unanswered": "the decode worker did not answer",
    "nothing_held": "no worker holds the beginning of this prompt",
    "no_worker": "no worker of this model was known",
    "never_cached": "this tenant's prompts are never cached",
    "no_blocks": "the decode worker had too few free blocks",
    "no_slot": "the decode worker had no free slot",
    "NoBlocks": "the decode worker had too few free blocks",
    "NoSlot": "the decode worker had no free slot",
    "NeverFits": "the request is larger than the whole KV pool",
}
"""Reasons and stable error codes, wherever they appear."""
FREE_WORDS = {
    "done": "the decode worker has all of it",
    "lease": "the decode worker asked for nothing until the lease ran out",
    "decode_restarted": "the decode worker was restarted",
    "decode_died": "the decode worker died",
    "cancelled": "the request was cancelled",
    "superseded": "a newer attempt took its place",
    "released": "the decode worker no longer wants it",
    "refused": "the worker could not begin it",
    "withdrawn": "its client had gone, or its ingress had ended it",
    "stopping": "the worker was stopping",
}
"""Why a prefill worker let its blocks go."""
_FINE = ("", "ok", "placed")
_HTTP_FAULT = 400


class _Span:
    """Attributes with defaults, by type."""

    def __init__(self, span: SpanRecord) -> None:
        self._attributes = span.attributes

    def has(self, name: str) -> bool:
        return name in self._attributes

    def text(self, name: str) -> str:
        return str(self._attributes.get(name, ""))

    def number(self, name: str) -> int:
        return int(self.seconds(name))

    def seconds(self, name: str) -> float:
        value = self._attributes.get(name, 0)
        return float(value) if isinstance(value, int | float) else 0.0

    def flag(self, name: str) -> bool:
        return self._attributes.get(name) is True


def failed(span: SpanRecord) -> bool:
    """Did what the span stands for go wrong, or was it refused?"""
    status = str(span.attributes.get(a.STATUS, ""))
    requeued = status == "requeued"
    return span.status == "error" or a.ERROR_CODE in span.attributes or (status not in _FINE and not requeued)


def why(span: SpanRecord) -> tuple[str, ...]:
    """What was decided in the span and why, most telling first; empty when nothing was."""
    say = _SAY.get(span.name)
    found = _Span(span)
    said = list(say(found)) if say is not None else []
    if not said and failed(span):
        said = [f"failed: {_explained(found.text(a.REASON) or found.text(a.STATUS) or 'error')}"]
    return tuple(said)


def _explained(word: str, words: dict[str, str] = CODE_WORDS) -> str:
    """A reason with what it means. `Class/code` and `reason:detail` are known by either half too."""
    bare = word.rpartition("/")[2].rpartition(":")[2]
    found = (words.get(word), words.get(bare), CODE_WORDS.get(bare), words.get(word.partition(":")[0]))
    meaning = next(filter(None, found), "")
    return f"{meaning} ({word})" if meaning else word or "no reason given"


def _request(span: _Span) -> Iterator[str]:
    status = span.text(a.STATUS)
    if status not in _FINE:
        http = span.number(a.HTTP_STATUS)
        answered = f", answered with HTTP {http}" if http >= _HTTP_FAULT else ""
        yield f"failed: {_explained(status)}{answered}"
    if span.number(a.EPOCH) > 1:
        yield f"attempt {span.number(a.EPOCH)}: an earlier one was lost; its committed tokens were kept"
    if span.has(a.TTFT_S):
        prompt = count(span.number(a.PROMPT_TOKENS), "prompt token")
        ttft, cached = seconds(span.seconds(a.TTFT_S)), span.number(a.CACHED_TOKENS)
        yield f"first token after {ttft}; {cached:,} of {prompt} came from the cache"


def _tokenize(span: _Span) -> Iterator[str]:
    if span.has(a.PROMPT_TOKENS):
        yield f"the prompt is {count(span.number(a.PROMPT_TOKENS), 'token')}"


def _admit(span: _Span) -> Iterator[str]:
    if span.text(a.STATUS) == "ok":
        reserved = span.number(a.RESERVED_TOKENS)  # batch work takes nothing from the limits a minute
        held = f"{count(reserved, 'token')} reserved" if reserved else "nothing reserved"
        yield f"admitted as {span.text(a.CLASS)}: {held}, {span.seconds(a.BUDGET_S):g} s to finish in"
    elif span.has(a.STATUS):
        yield f"refused: {_explained(span.text(a.REASON) or span.text(a.STATUS))}"


def _settle(span: _Span) -> Iterator[str]:
    if span.text(a.REASON) == "already_booked":
        yield "booked before; nothing was charged twice"
    elif span.text(a.STATUS) == "ok":
        used = span.number(a.PROMPT_TOKENS) + span.number(a.COMPLETION_TOKENS)
        reserved = span.number(a.RESERVED_TOKENS)
        of = f"{used:,} of {count(reserved, 'reserved token')}" if reserved else count(used, "token")
        yield f"{of} charged"


def _submit(span: _Span) -> Iterator[str]:
    if span.has(a.QUEUE_POSITION):
        ahead = span.number(a.QUEUE_POSITION)
        place = "nobody ahead in the queue" if ahead == 0 else f"{ahead:,} ahead in the queue"
        yield f"{place}; first token predicted in {seconds(span.seconds(a.PREDICTED_TTFT_S))}"
    elif span.has(a.STATUS):
        yield f"refused: {_explained(span.text(a.STATUS))}"


def _place(span: _Span) -> Iterator[str]:
    outcome, reason = span.text(a.STATUS), span.text(a.REASON)
    if outcome == "placed":
        yield _path(span)
        matched = span.number(a.MATCHED_TOKENS)
        held = f"holds {count(matched, 'token')} of the prompt" if matched else "holds nothing of the prompt"
        yield f"{span.text(a.DECODE_WORKER)} {held}; chosen from {count(span.number(a.CANDIDATES), 'worker')} with room"
        if span.number(a.EPOCH) > 1:
            yield f"attempt {span.number(a.EPOCH)}: an earlier one was lost"
    elif outcome == "requeued":
        yield f"back in the queue: {_explained(reason)}"
    elif outcome:
        yield f"{outcome}: {_explained(reason or outcome)}"


def _path(span: _Span) -> str:
    reason, local, away = span.text(a.REASON), span.seconds(a.LOCAL_S), span.seconds(a.HANDED_OFF_S)
    estimates = f"first token estimated in {seconds(away)} handed off, {seconds(local)} local"
    if span.text(a.PATH) == "handed_off":
        return f"handed off to {span.text(a.PREFILL_WORKER)} ({reason}): {estimates}"
    if reason == "estimate":
        return f"local (estimate): {estimates}"
    expected = f"; first token estimated in {seconds(local)}" if local else ""
    return f"local: {_explained(reason, LOCAL_WORDS)}{expected}"


def _match(span: _Span) -> Iterator[str]:
    reason = span.text(a.REASON)
    if reason == "found":
        yield (
            f"found: {count(span.number(a.MATCHED_BLOCKS), 'block')} of {span.number(a.BLOCKS):,} held by the best of "
            f"{count(span.number(a.HOLDERS), 'worker')}"
        )
    elif reason:
        yield _explained(reason)


def _reserve(span: _Span) -> Iterator[str]:
    if span.has(a.ERROR_CODE):
        yield f"refused: {_explained(span.text(a.ERROR_CODE))}"
    elif span.text(a.REASON) == "already_running":
        yield "already running here: the answer to the first reservation was lost"
    elif span.has(a.CACHED_TOKENS):
        tokens = count(span.number(a.PROMPT_TOKENS), "token")
        yield f"blocks reserved; {span.number(a.CACHED_TOKENS):,} of {tokens} cached"


def _prefill(span: _Span) -> Iterator[str]:
    if span.has(a.COMPUTED_TOKENS):
        yield (
            f"{count(span.number(a.COMPUTED_TOKENS), 'token')} computed in {count(span.number(a.CHUNKS), 'chunk')}, "
            f"{span.number(a.CACHED_TOKENS):,} cached"
        )
    if reason := span.text(a.REASON):
        yield f"blocks let go: {_explained(reason, FREE_WORDS)}"


def _pull(span: _Span) -> Iterator[str]:
    if span.has(a.BYTES):
        yield (
            f"{size(span.number(a.BYTES))} in {count(span.number(a.BLOCKS), 'block')} from "
            f"{span.text(a.PREFILL_WORKER)} through {span.text(a.TRANSPORT).replace('_', ' ')}"
        )
    if mismatches := span.number(a.MISMATCHES):
        yield f"{count(mismatches, 'block')} failed the digest and were computed again"
    if reason := span.text(a.REASON):
        yield f"given up: {_explained(reason, HANDOFF_WORDS)}"


def _run(span: _Span) -> Iterator[str]:
    if span.flag(a.FAKE):
        yield "a fake worker: these tokens are made up"
    if reason := span.text(a.REASON):
        yield f"hand-off given up, the rest was computed here: {_explained(reason, HANDOFF_WORDS)}"
    if span.has(a.FINISH):
        yield f"{count(span.number(a.COMPLETION_TOKENS), 'token')} sampled; ended: {span.text(a.FINISH) or 'unknown'}"
    if preempted := span.number(a.PREEMPTIONS):
        yield f"preempted {count(preempted, 'time')} for want of blocks, and computed again"


def _stream(span: _Span) -> Iterator[str]:
    if lost := span.number(a.LOST_WORKERS):
        yield f"{count(lost, 'worker')} lost while it ran"
    if replays := span.number(a.REPLAYS):
        yield f"lost frames were asked for again {count(replays, 'time')}"


_SAY: dict[str, Callable[[_Span], Iterator[str]]] = {
    "gateway.request": _request,
    "gateway.tokenize": _tokenize,
    "gateway.stream": _stream,
    "batch.item": _request,
    "batch.tokenize": _tokenize,
    "batch.stream": _stream,
    "policy.admit": _admit,
    "policy.settle": _settle,
    "scheduler.submit": _submit,
    "scheduler.place": _place,
    "index.match": _match,
    "decode.reserve": _reserve,
    "decode.run": _run,
    "prefill.run": _prefill,
    "handoff.pull": _pull,
}
