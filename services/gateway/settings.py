"""What a gateway needs to know, in one frozen object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.contracts.ids import IngressId


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Times in seconds, sizes in bytes."""

    ingress_id: IngressId
    model: str
    context: int
    """Most tokens of prompt and output together."""
    pool: str = "default"
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    hop_timeout_s: float = 5.0
    submit_s: float = 8.0
    """A request no scheduler ever took is tried for so long: an election takes the lease and a little more."""
    worker_silence_s: float = 10.0
    """A worker of a running request not heard for so long is lost."""
    drain_s: float = 10.0
    max_unsent_bytes: int = 256 * 1024
    max_blocked_s: float = 30.0
    tick_s: float = 0.25
    beat_s: float = 1.0
    alive_s: float = 5.0
    """A service counts as alive for so long after it was heard."""
    probe_key: str = ""
    """API key of the gateway's own one-token request; empty: readiness does not wait for a token."""


def context_length(model_dir: Path) -> int:
    """`max_position_embeddings` of a model folder. Raises SettingsError when it is not there."""
    path = model_dir / "config.json"
    try:
        value = json.loads(path.read_bytes())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SettingsError(f"{path}: no max_position_embeddings", param=str(path)) from exc
    if type(value) is not int or value < 2:
        raise SettingsError(f"{path}: max_position_embeddings must be an integer above 1", param=str(path))
    return value
