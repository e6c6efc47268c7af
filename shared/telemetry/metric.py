"""What a metric is: its type, the closed sets its labels draw from, and the edges of histograms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OTHER = "other"
"""What a value outside a label's closed set becomes."""
MAX_TENANTS = 200
"""Tenants told apart with `[metrics] tenant_labels`; later ones count as `other`."""

INGRESSES = ("gateway", "batch")
WORKERS = ("prefill", "decode")
ALL = ("gateway", "batch", "policy", "scheduler", "prefix-cache-index", "prefill", "decode")

CLASSES = ("interactive", "analysis", "batch")
PATHS = ("local", "handed_off")
ROLES = ("prefill", "decode")

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
"""vLLM's 1-2-5 series; it ends it at the model's context, which one table for all models cannot."""
HOP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds of what usually takes milliseconds."""

REFUSALS = (
    "invalid_value",
    "invalid_json",
    "unknown_parameter",
    "context_length_exceeded",
    "model_not_found",
    "invalid_api_key",
    "forbidden",
    "conflict",
    "request_too_large",
    "idempotency_key_reused",
    "stream_not_found",
    "previous_response_not_found",
    "previous_response_not_ended",
    "storage_limit_exceeded",
    "rate_limit_exceeded",
    "concurrency_limit_exceeded",
    "too_many_keys",
    "request_timeout",
    "client_gone",
    "shutting_down",
    "overloaded",
    "unavailable",
    "no_responders",
    "deadline_exceeded",
    "protocol_error",
    "internal_error",
)
"""Stable codes of errors a request can be turned away with."""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. A counter's name gets `_total` when it is exposed.

    `labels` maps a label to its closed set of values; () where a process names the value itself. `buckets` are a
    histogram's upper edges, without infinity. `services` are those that expose it.
    """

    name: str
    kind: Kind
    meaning: str
    services: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    unit: str = ""

    @property
    def exposed(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name
