"""What a gateway notes of each request's time, and what of it was its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

TIMES_VARIABLE = "BATON_BENCH_TIMES"
"""Names the file that gets the notes when the gateway ends."""
NAMES = ("came", "asked", "granted", "submitted", "token", "answered")
"""Monotonic seconds when the request's last bytes were here, policy was asked, its answer was here, the scheduler was
asked, the first frame with its tokens was here, and the first bytes of its answer were given to the socket."""


class Notes:
    """What was noted of each request."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, float]] = {}
        self.read = 0.0  # when the bus last brought something

    def note(self, request_id: str, name: str, at: float) -> None:
        """Keep the first of each."""
        self.of.setdefault(request_id, {}).setdefault(name, at)


def shares_of(notes: Mapping[str, Mapping[str, float]], request_ids: Iterable[str]) -> dict[str, float]:
    """Milliseconds of the way to a first token: the gateway's own, by part and in all, and what it waited for others.

    Its own is from bytes to the question to policy, from policy's answer to the submit, and from the frame to the bytes
    of the answer; what its event loop did for others meanwhile is in it. Requests without a token are left out.
    """
    found = [notes[request_id] for request_id in request_ids if len(notes.get(request_id, ())) == len(NAMES)]
    parts = {
        "to_policy": [one["asked"] - one["came"] for one in found],
        "to_submit": [one["submitted"] - one["granted"] for one in found],
        "to_client": [one["answered"] - one["token"] for one in found],
        "policy_hop": [one["granted"] - one["asked"] for one in found],
        "token_hop": [one["token"] - one["submitted"] for one in found],
    }
    own = [sum(some) for some in zip(parts["to_policy"], parts["to_submit"], parts["to_client"], strict=True)]
    values = {**parts, "own": own}
    return {
        f"{name}_p{share}_ms": _at(sorted(some), share / 100) * 1e3
        for name, some in values.items()
        for share in (50, 99)
    }


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
