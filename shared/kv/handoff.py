"""The exchange of KV between a prefill worker (`Source`) and a decode worker (`Sink`), for one attempt. Pure.

The source names finished blocks in cumulative, numbered commits; the sink pulls them while prefill goes on, checks the
digest of what lies in its *own* blocks, and acknowledges. Ownership, in tokens of a prompt of n tokens:

    [0, hit)      found in the sink's own cache; never pulled
    [hit, n - 1)  computed at the source, pulled by the sink
    [n - 1, n)    the last prompt token: computed by the sink as its first decode step

A full block is named once its KV is final; the partial tail block only in the last commit. The source's blocks stay
until `Free`; the sink's blocks may be written by a pull until `Pull` was answered, so it never goes local, and never
lets go of blocks, before that. Everything is plural per layer group. `now` is seconds on a monotonic clock.
"""

from shared.kv.handoff_sink import (
    Closed,
    Pull,
    PullItem,
    Received,
    SendAck,
    SendRelease,
    Sink,
    SinkEffect,
    TurnLocal,
)
from shared.kv.handoff_source import Free, SendCommit, Source, SourceEffect, SourceIdentity

__all__ = [
    "Closed",
    "Free",
    "Pull",
    "PullItem",
    "Received",
    "SendAck",
    "SendCommit",
    "SendRelease",
    "Sink",
    "SinkEffect",
    "Source",
    "SourceEffect",
    "SourceIdentity",
    "TurnLocal",
]
