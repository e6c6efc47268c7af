"""Names and counters that cross the bus.

Counters that are not the same thing have types of their own, so that a checker refuses to compare an ingress epoch
with a leader's term.
"""

from __future__ import annotations

import re
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
WorkerId = NewType("WorkerId", str)
IngressId = NewType("IngressId", str)
FileId = NewType("FileId", str)
BatchId = NewType("BatchId", str)
BlockTag = NewType("BlockTag", bytes)
"""Keyed BLAKE2b-128 of (parent tag, token ids) under a scope's key; 16 bytes. Workers know tags, never keys."""

Epoch = NewType("Epoch", int)
"""Raised only by the ingress that holds the client's stream; from 1."""
Dispatch = NewType("Dispatch", int)
"""Raised only by the scheduler; from 1 in each epoch."""
Term = NewType("Term", int)
"""Monotonic revision of the scheduler leader's lease."""
Incarnation = NewType("Incarnation", int)
"""Process start of a worker, unix nanoseconds."""
ScopeGeneration = NewType("ScopeGeneration", int)
"""Authorization generation of a scope; raised by purges and permission changes."""
KeyVersion = NewType("KeyVersion", int)
"""Version of a scope's secret key."""
BlockGeneration = NewType("BlockGeneration", int)
"""How often a pool block has been handed out; a stale reader sees another generation."""

ID_PATTERN = re.compile(r"[a-z0-9-]{1,40}")


def is_id(text: str) -> bool:
    """True if `text` may stand in a subject: `[a-z0-9-]{1,40}`."""
    return ID_PATTERN.fullmatch(text) is not None


def new_request_id() -> RequestId:
    """A request id nobody can guess: 128 random bits."""
    return RequestId(f"req-{secrets.token_hex(16)}")


def new_process_id(role: str) -> str:
    """An id for one start of a process, such as `decode-1f0c8a2b9d3e`; a restart never reuses it."""
    return f"{role}-{secrets.token_hex(6)}"
