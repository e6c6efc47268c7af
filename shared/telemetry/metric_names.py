"""Every metric of Baton, in one table: name, type, labels, meaning, and which service counts it.

Registries are built from this table and `docs/metrics.md` is written from it, so a metric that is not here does not
exist. `vllm:` names mean what vLLM means by them and have its buckets; what only Baton has is called `baton_`.

A label takes its values from a closed set that stands here; any other value becomes `other`. Where no set stands, a
process names the value itself: a served model, its own worker id, a fact about itself. So what clients send can never
add a series.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.telemetry.metric import (
    ALL,
    CLASSES,
    HOP_BUCKETS,
    INGRESSES,
    ITERATION_BUCKETS,
    ITL_BUCKETS,
    N_BUCKETS,
    PATHS,
    REFUSALS,
    REQUEST_BUCKETS,
    ROLES,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    WORKERS,
    Metric,
)

MODEL: Mapping[str, tuple[str, ...]] = {"model_name": ()}
ENGINE: Mapping[str, tuple[str, ...]] = {"model_name": (), "engine": ()}

# ---------------------------------------------------------------------------------------- vLLM's names, of requests

TTFT = Metric(
    "vllm:time_to_first_token_seconds",
    "histogram",
    "From the request's arrival at the ingress to its first output token; one observation a request that got one.",
    INGRESSES,
    MODEL,
    TTFT_BUCKETS,
    "s",
)
ITL = Metric(
    "vllm:inter_token_latency_seconds",
    "histogram",
    "Between one output token and the next of a request as they reach the ingress; those that come together share "
    "their gap. As computed: `baton.itl_*` of the span `decode.run`.",
    INGRESSES,
    MODEL,
    ITL_BUCKETS,
    "s",
)
E2E = Metric(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "From arrival to the last token, of requests that ended with stop or length.",
    INGRESSES,
    MODEL,
    REQUEST_BUCKETS,
    "s",
)
QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    "histogram",
    "From arrival to the first placement on a worker, of requests that ended with stop or length.",
    INGRESSES,
    MODEL,
    REQUEST_BUCKETS,
    "s",
)
PREFILL_TIME = Metric(
    "vllm:request_prefill_time_seconds",
    "histogram",
    "From the first placement to the first token, of requests that ended with stop or length.",
    INGRESSES,
    MODEL,
    REQUEST_BUCKETS,
    "s",
)
DECODE_TIME = Metric(
    "vllm:request_decode_time_seconds",
    "histogram",
    "From the first token to the last, of requests that ended with stop or length; a resume's pause included.",
    INGRESSES,
    MODEL,
    REQUEST_BUCKETS,
    "s",
)
INFERENCE_TIME = Metric(
    "vllm:request_inference_time_seconds",
    "histogram",
    "From the first placement to the last token: prefill and decode time together.",
    INGRESSES,
    MODEL,
    REQUEST_BUCKETS,
    "s",
)
REQUEST_SUCCESS = Metric(
    "vllm:request_success",
    "counter",
    "Requests that were admitted and have ended, by how.",
    INGRESSES,
    {**MODEL, "finished_reason": ("stop", "length", "abort", "error")},
)
REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens",
    "histogram",
    "Prompt tokens of requests that ended with stop or length, cached ones included.",
    INGRESSES,
    MODEL,
    TOKEN_BUCKETS,
    "tokens",
)
REQUEST_GENERATION_TOKENS = Metric(
    "vllm:request_generation_tokens",
    "histogram",
    "Output tokens of requests that ended with stop or length.",
    INGRESSES,
    MODEL,
    TOKEN_BUCKETS,
    "tokens",
)
PARAMS_N = Metric(
    "vllm:request_params_n",
    "histogram",
    "Choices asked for (n) by admitted requests.",
    INGRESSES,
    MODEL,
    N_BUCKETS,
)
PARAMS_MAX_TOKENS = Metric(
    "vllm:request_params_max_tokens",
    "histogram",
    "max_tokens of admitted requests, the default filled in.",
    INGRESSES,
    MODEL,
    TOKEN_BUCKETS,
    "tokens",
)

# ---------------------------------------------------------------------------------------- vLLM's names, of engines

RUNNING = Metric(
    "vllm:num_requests_running", "gauge", "Sequences the engine computes in its steps now.", WORKERS, ENGINE
)
WAITING = Metric(
    "vllm:num_requests_waiting",
    "gauge",
    "Sequences accepted by the worker that wait for KV or for their turn. The queue of the model pool is "
    "`baton_queued_requests`.",
    WORKERS,
    ENGINE,
)
KV_USAGE = Metric(
    "vllm:kv_cache_usage_perc",
    "gauge",
    "Share of KV blocks that are referenced, 0 to 1; blocks that are only cached count as free.",
    WORKERS,
    ENGINE,
)
CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    "gauge",
    "Always 1; the labels say how the KV pool is made.",
    WORKERS,
    {**ENGINE, "block_size": (), "num_gpu_blocks": (), "cache_dtype": ()},
)
PREFIX_QUERIES = Metric(
    "vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the worker's prefix cache.", WORKERS, ENGINE
)
PREFIX_HITS = Metric(
    "vllm:prefix_cache_hits", "counter", "Prompt tokens found in the worker's prefix cache.", WORKERS, ENGINE
)
NUM_PREEMPTIONS = Metric("vllm:num_preemptions", "counter", "Sequences whose blocks were taken.", ("decode",), ENGINE)
SPEC_DRAFTS = Metric("vllm:spec_decode_num_drafts", "counter", "Drafts that steps verified.", ("decode",), ENGINE)
SPEC_DRAFTED = Metric("vllm:spec_decode_num_draft_tokens", "counter", "Guessed tokens verified.", ("decode",), ENGINE)
SPEC_ACCEPTED = Metric("vllm:spec_decode_num_accepted_tokens", "counter", "Guessed tokens right.", ("decode",), ENGINE)
PROMPT_TOKENS = Metric(
    "vllm:prompt_tokens",
    "counter",
    "Prompt tokens of requests that got their first token here, cached and handed-off ones included. Counted by decode "
    "workers alone, so that the sum over workers counts a prompt once.",
    ("decode",),
    ENGINE,
)
GENERATION_TOKENS = Metric("vllm:generation_tokens", "counter", "Output tokens sampled.", ("decode",), ENGINE)
ITERATION_TOKENS = Metric(
    "vllm:iteration_tokens_total",
    "histogram",
    "Tokens computed in one step, prompt and output together.",
    WORKERS,
    ENGINE,
    ITERATION_BUCKETS,
    "tokens",
)

# ---------------------------------------------------------------------------------------- ingresses: gateway, batch

IN_FLIGHT = Metric(
    "baton_requests_in_flight", "gauge", "Requests admitted here that are not settled yet.", INGRESSES, MODEL
)
REFUSED = Metric(
    "baton_requests_refused",
    "counter",
    "Requests turned away before they were queued, by the stable code of the error.",
    INGRESSES,
    {"reason": REFUSALS},
)
FAILED = Metric(
    "baton_requests_failed",
    "counter",
    "Admitted requests that ended with an error, by its stable code.",
    INGRESSES,
    {
        **MODEL,
        "reason": (*REFUSALS, "engine_error", "worker_lost", "worker_stopping", "checksum_mismatch", "purged"),
    },
)
CANCELLED = Metric(
    "baton_requests_cancelled",
    "counter",
    "Admitted requests that were cancelled, by why.",
    INGRESSES,
    {**MODEL, "reason": ("client_gone", "slow_client", "cancelled", "expired")},
)
EPOCHS_RAISED = Metric(
    "baton_epochs_raised",
    "counter",
    "Times an attempt was declared lost and the request submitted again under a higher epoch.",
    INGRESSES,
    MODEL,
)
RESUMES = Metric(
    "baton_resumes",
    "counter",
    "Times a request that had tokens already got its next one from a later attempt.",
    INGRESSES,
    MODEL,
)
REPLAYS = Metric(
    "baton_stream_replays", "counter", "Times missing tokens were asked for again at a worker.", INGRESSES, MODEL
)
SETTLEMENT_LAG = Metric(
    "baton_settlement_lag_seconds",
    "histogram",
    "From a request's end to its settlement being stored in the stream.",
    INGRESSES,
    {},
    HOP_BUCKETS,
    "s",
)
SETTLEMENTS_LOST = Metric(
    "baton_settlements_lost",
    "counter",
    "Requests whose settlement was not stored: NATS did not take it, or a batch item was no longer this process's own. "
    "Where a reservation was held it runs out.",
    INGRESSES,
)

# ---------------------------------------------------------------------------------------- scheduler

QUEUE_DELAY = Metric(
    "baton_queue_delay_seconds",
    "histogram",
    "From a request's arrival to its placement, by class; one placed again counts again.",
    ("scheduler",),
    {**MODEL, "class": CLASSES},
    (*HOP_BUCKETS, 60.0, 120.0, 300.0),
    "s",
)
QUEUED = Metric(
    "baton_queued_requests",
    "gauge",
    "Requests that wait for a place, by class; 0 in a scheduler that does not lead.",
    ("scheduler",),
    {**MODEL, "class": CLASSES},
)
PLACED = Metric("baton_placed_requests", "gauge", "Requests placed on workers now.", ("scheduler",), MODEL)
PLACEMENTS = Metric(
    "baton_placements",
    "counter",
    "Placements, by path and the reason for it.",
    ("scheduler",),
    {
        **MODEL,
        "path": PATHS,
        "reason": (
            "estimate",
            "prompt_logprobs",
            "one_token",
            "cached",
            "running",
            "adopted",
            "no_prefill_worker",
            "no_kv_path",
            "prefill_lost",
            "prefill_refused",
            "prefill_timeout",
        ),
    },
)
REQUEUES = Metric(
    "baton_placement_retries",
    "counter",
    "Tries at placing that put the request back where it stood, by why.",
    ("scheduler",),
    {
        **MODEL,
        "reason": (
            *("no_room", "unanswered", "worker_lost", "revoked"),
            *("no_blocks", "no_slot", "overloaded", "conflict"),
        ),
    },
)
QUEUE_REFUSALS = Metric(
    "baton_queue_refusals",
    "counter",
    "Requests the scheduler turned away or gave up: queue_full and slo when they came, the others also later.",
    ("scheduler",),
    {
        **MODEL,
        "reason": (
            *("queue_full", "slo", "no_worker", "deadline_exceeded", "context_length_exceeded", "invalid_value"),
            *("message_too_large", "purged"),
            *("forbidden", "grant_expired", "grant_invalid", "ingress_silent", "unlisted", "conflict"),
        ),
    },
)
MATCH_TIMEOUTS = Metric(
    "baton_match_timeouts",
    "counter",
    "Prefix matches the index did not answer in time; each counted as no match.",
    ("scheduler",),
)
WORKERS_LOST = Metric(
    "baton_workers_lost",
    "counter",
    "Workers given up, by role and why.",
    ("scheduler",),
    {"role": ROLES, "reason": ("gone", "lease_expired", "replaced", "stalled")},
)
LIVE_WORKERS = Metric("baton_live_workers", "gauge", "Workers heard lately, by role.", ("scheduler",), {"role": ROLES})
LEADING = Metric("baton_leader", "gauge", "1 in the scheduler that leads its pool, else 0.", ("scheduler",), MODEL)
TERM = Metric("baton_leader_term", "gauge", "Term of the leading scheduler; 0 while not leading.", ("scheduler",))
LIMITER = Metric(
    "baton_limiter_active",
    "gauge",
    "1 when the limiter turned a request away in the last 15 seconds: admission (the scheduler's queue bound and "
    "predicted wait) or quota (policy's limits a tenant).",
    ("scheduler", "policy"),
    {"limiter": ("admission", "quota")},
)

# ---------------------------------------------------------------------------------------- workers

HANDOFFS = Metric(
    "baton_handoffs",
    "counter",
    "Hand-offs awaited by this decode worker that are over: done, or given up for local prefill or with the request.",
    ("decode",),
    {**MODEL, "outcome": ("done", "local", "closed")},
)
HANDOFF_FAILURES = Metric(
    "baton_handoff_failures",
    "counter",
    "Hand-offs given up for local prefill, by why.",
    ("decode",),
    {
        **MODEL,
        "reason": (
            *("digest_mismatch", "fingerprint_mismatch", "wrong_length", "wrong_groups", "gap"),
            *("prefill_failed", "prefill_lease", "prefill_died", "prefill_restarted", "placed_locally"),
            *("pool_unreadable", "pull_failed"),
            *("transfer_unreachable", "transfer_refused", "transfer_closed", "transfer_timed_out"),
        ),
    },
)
KV_READS = Metric(
    "baton_kv_reads",
    "counter",
    "Reads of its KV over TCP: refused by lease, generation, fingerprint or size; broken off by a slow or lost reader, "
    "or by the end of the lease.",
    ("prefill",),
    {**MODEL, "outcome": ("served", "refused", "broken")},
)
HANDOFF_BYTES = Metric(
    "baton_handoff_bytes", "counter", "KV bytes pulled from prefill workers.", ("decode",), MODEL, unit="bytes"
)
HANDOFF_SECONDS = Metric(
    "baton_handoff_seconds",
    "histogram",
    "Time one hand-off spent copying and digesting, summed over its pulls.",
    ("decode",),
    MODEL,
    HOP_BUCKETS,
    "s",
)
HANDOFF_SOURCES_ENDED = Metric(
    "baton_handoff_sources_ended",
    "counter",
    "Prompts computed for another worker whose blocks were given back, by why.",
    ("prefill",),
    {
        **MODEL,
        "reason": (
            "done",
            "released",
            "superseded",
            "cancelled",
            "refused",
            "stopping",
            "lease",
            "decode_died",
            "decode_restarted",
        ),
    },
)
RESERVATIONS = Metric(
    "baton_reservations_held", "gauge", "Reservations held, from accept to acknowledged final.", WORKERS, MODEL
)
RESERVATIONS_REFUSED = Metric(
    "baton_reservations_refused",
    "counter",
    "Reservations refused, by why.",
    WORKERS,
    {
        **MODEL,
        "reason": ("no_blocks", "no_slot", "never_fits", "draining", "fenced", "grant", "invalid", "cancelled"),
    },
)
LEASE_LOSSES = Metric(
    "baton_lease_losses",
    "counter",
    "Leases that ran out or whose holder died, by whose: the ingress of a request, the prefill worker of a hand-off "
    "(at a decode worker), the decode worker of one (at a prefill worker).",
    WORKERS,
    {"holder": ("ingress", "prefill", "decode")},
)
HEADROOM = Metric(
    "baton_kv_headroom_bytes",
    "gauge",
    "KV bytes that can be reserved now: free blocks and those only cached.",
    WORKERS,
    MODEL,
    unit="bytes",
)
POOL_BYTES = Metric("baton_kv_pool_bytes", "gauge", "Size of the KV pool.", WORKERS, MODEL, unit="bytes")
STEP_SECONDS = Metric(
    "baton_step_seconds", "histogram", "Duration of engine steps that succeeded.", WORKERS, MODEL, HOP_BUCKETS, "s"
)
KERNEL_CPU = Metric(
    "baton_kernel_cpu_seconds",
    "counter",
    "Processor time of all threads within the native kernels; what else of the process's is Python's.",
    WORKERS,
    MODEL,
    unit="s",
)
QUICK_HEAD_ROWS = Metric(
    "baton_quick_head_rows",
    "counter",
    "Rows of logits for which a head of 8-bit integers was asked first: few blocks of the real one were computed then, "
    "or more than a quarter.",
    WORKERS,
    {"outcome": ("few", "many")},
)
COMPUTED_TOKENS = Metric(
    "baton_computed_tokens", "counter", "Tokens computed in steps, prompt and output together.", WORKERS, MODEL
)

# ---------------------------------------------------------------------------------------- policy

ADMISSIONS = Metric(
    "baton_admissions",
    "counter",
    "Answers to admit: granted, or the stable code of the refusal.",
    ("policy",),
    {"outcome": ("granted", *REFUSALS, "unknown_tenant")},
)
SETTLEMENTS = Metric(
    "baton_settlements",
    "counter",
    "Settlements taken from the stream: booked, booked before, or dropped because they were not ours.",
    ("policy",),
    {"outcome": ("booked", "already_booked", "dropped")},
)
BILLED_TOKENS = Metric(
    "baton_billed_tokens",
    "counter",
    "Tokens booked in the ledger, by kind.",
    ("policy",),
    {"kind": ("prompt", "cached", "completion")},
)
TENANT_TOKENS = Metric(
    "baton_tenant_tokens",
    "counter",
    "Tokens booked in the ledger, by tenant and kind. Only with `[metrics] tenant_labels`.",
    ("policy",),
    {"tenant": (), "kind": ("prompt", "cached", "completion")},
)
TENANT_RUNNING = Metric(
    "baton_tenant_requests_running",
    "gauge",
    "Requests of a tenant that hold one of its places at once, waiting ones included, of all gateways together; every"
    " policy process tells the same. At most a second old. Only with `[metrics] tenant_labels`.",
    ("policy",),
    {"tenant": ()},
)

# ---------------------------------------------------------------------------------------- prefix cache index

INDEX_ENTRIES = Metric("baton_index_entries", "gauge", "Different tags some worker holds.", ("prefix-cache-index",))
INDEX_MATCHES = Metric(
    "baton_index_matches",
    "counter",
    "Answers to match: found, nothing_held, no_worker, never_cached, or refused.",
    ("prefix-cache-index",),
    {"outcome": ("found", "nothing_held", "no_worker", "never_cached", "refused", "unavailable")},
)
INDEX_EXTENDED = Metric(
    "baton_index_extended_runs",
    "counter",
    "Runs of new blocks that workers asked tags for: tagged or refused.",
    ("prefix-cache-index",),
    {"outcome": ("tagged", "refused")},
)
INDEX_REPLAYS = Metric(
    "baton_index_replays", "counter", "Snapshots asked of workers, new or with a gap.", ("prefix-cache-index",)
)
PURGES_PENDING = Metric(
    "baton_purges_pending",
    "gauge",
    "Purges of tenants that some owner of copies has not acknowledged; every policy process tells the same."
    " `./baton purge --status` names the owners.",
    ("policy",),
)
SCOPES_RAISED = Metric(
    "baton_scope_generations_raised",
    "counter",
    "Scope generations learned: of a tenant seen first, or risen.",
    ("prefix-cache-index",),
)

# ---------------------------------------------------------------------------------------- batch

BATCH_ITEMS = Metric(
    "baton_batch_items",
    "gauge",
    "Items of batches that have not ended, by state.",
    ("batch",),
    {"state": ("waiting", "running", "completed", "failed")},
)
BATCH_JOBS = Metric(
    "baton_batch_jobs",
    "gauge",
    "Batches that have not ended, by state.",
    ("batch",),
    {"state": ("validating", "in_progress", "finalizing", "cancelling")},
)

# ---------------------------------------------------------------------------------------- every process

BUILD_INFO = Metric(
    "baton_build_info",
    "gauge",
    "Always 1; the labels say what runs: service, Python, and in workers the numerics id and whether tokens are made "
    "up.",
    ALL,
    {"service": (), "python": (), "numerics": (), "fake": ("true", "false")},
)
BUS_CONNECTED = Metric("baton_bus_connected", "gauge", "1 while the process is connected to NATS.", ALL)
BUS_DROPPED = Metric(
    "baton_bus_dropped",
    "counter",
    "Messages not handled: undecodable, expired (budget spent on arrival), refused (too many in flight), "
    "handler_failed, slow_consumer (lost in the client), unsent (lost before they were sent).",
    ALL,
    {"reason": ("undecodable", "expired", "refused", "handler_failed", "slow_consumer", "unsent")},
)
SPANS = Metric("baton_spans", "counter", "Spans ended.", ALL)
SPANS_DROPPED = Metric(
    "baton_spans_dropped",
    "counter",
    "Spans that never arrived: on the way to the gateways (bus), or to the OTLP collector (otlp).",
    ALL,
    {"to": ("bus", "otlp")},
)

TABLE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of the above, in that order."""


def of_service(service: str) -> tuple[Metric, ...]:
    """The metrics a service exposes."""
    return tuple(metric for metric in TABLE if service in metric.services)
