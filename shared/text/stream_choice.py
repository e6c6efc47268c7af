"""The parts of `stream_commit`: its bounds, and what it remembers of one output."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.parts import StreamRecord, Totals
from shared.contracts.tokens import completion_checksum

MAX_PENDING = 1024
"""Records held per choice behind a gap; what is beyond comes with the replay."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """Bounds of one stream, in seconds and counts."""

    worker_silence_s: float = 10.0
    """No news from the worker for so long: its attempt is lost."""
    replay_timeout_s: float = 1.0
    max_replays: int = 3
    """Replays asked for without an answer before the attempt is lost."""
    absent_s: float = 2.5
    """A worker whose complete listings lack the attempt for so long has lost it."""
    close_reply_s: float = 2.0
    """Wait for the worker's account after finish or cancel; then the request is settled without it."""
    resubmit_s: float = 1.0
    """Pause between tries to submit."""
    first_submit_s: float = 8.0
    """A request no scheduler ever took is tried for so long: an election, or a restart, takes a few seconds."""
    max_lost: int = 3
    """The loss with this number ends the request with an error."""
    max_moves: int = 8
    """So many stops of workers on purpose are no losses: a rolling restart may move one request several times."""


@dataclass(slots=True)
class ChoiceState:
    committed: list[int] = field(default_factory=list)
    pending: dict[int, StreamRecord] = field(default_factory=dict)
    finish: str = ""
    replay_at: float = -1.0  # when the replay in progress was asked for; negative: none
    replays: int = 0  # asked for in a row without an answer

    def forget(self) -> None:
        """Drop what came from an attempt that is no longer current."""
        self.pending.clear()
        self.replayed()

    def replayed(self) -> None:
        """No replay is outstanding."""
        self.replay_at, self.replays = -1.0, 0

    def pop_ready(self) -> StreamRecord | None:
        """Takes out the held record that has no gap before it any more."""
        first = min(self.pending, default=None)
        return None if first is None or first > len(self.committed) else self.pending.pop(first)

    def agrees(self, first_seq: int, token_ids: list[int]) -> bool:
        """False when tokens that came again, from number `first_seq` on, are others than those committed."""
        known = len(self.committed) - first_seq
        return not known or token_ids[:known] == self.committed[first_seq : first_seq + len(token_ids)]

    def is_whole(self, num_tokens: int, totals: Totals) -> bool:
        """True when the committed tokens are the worker's: as many, and the same by its checksum where it has one."""
        if num_tokens != len(self.committed):
            return False
        return not totals.checksum or totals.checksum == completion_checksum(self.committed)
