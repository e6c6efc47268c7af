"""What a gateway needs to know, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.gateway.edge import NO_EDGE, Edge
from shared.ingress.config import IngressConfig


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Times in seconds, sizes in bytes."""

    ingress: IngressConfig
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_file_bytes: int = 200 * 1024 * 1024
    edge: Edge = NO_EDGE
    probe_key: str = ""
    """API key of the gateway's own one-token request; empty: readiness does not wait for a token."""
    keep_alive_s: float = 15.0
    """A stream silent for so long gets a comment; 0: none."""
    keyed_linger_s: float = 60.0
    """A request with an Idempotency-Key goes on for so long without a client."""
    store_responses: Literal["asked", "always", "never"] = "asked"
    """Which responses are stored: where `store` is true, unless it is false, none."""
