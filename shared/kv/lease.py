"""A lease on work a peer does for us: renewed by the peer's beats as long as its engine thread makes progress."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProgressLease:
    """Runs out when the peer's progress counter for an attempt has not advanced for `lease_s` seconds.

    A frozen process sends no beat; a process whose engine hangs sends beats with a counter that stands still. Both
    end the lease. All times are seconds on the holder's monotonic clock.
    """

    lease_s: float
    until: float
    incarnation: int = 0  # the peer's; 0 until a beat or message told it
    progress: int = -1

    @classmethod
    def start(cls, lease_s: float, now: float, incarnation: int = 0) -> ProgressLease:
        """A lease that runs from `now`."""
        return cls(lease_s=lease_s, until=now + lease_s, incarnation=incarnation)

    def beat(self, incarnation: int, progress: int | None, now: float) -> bool:
        """Take a beat of the peer; `progress` is None when the beat does not list the attempt.

        Returns False when the peer was restarted: what it held for us is gone.
        """
        if self.incarnation == 0:
            self.incarnation = incarnation
        if incarnation != self.incarnation:
            # A beat of the process before the one we know may arrive late; only a younger process means a restart.
            return incarnation < self.incarnation
        if progress is not None and progress > self.progress:
            self.progress = progress
            self.until = now + self.lease_s
        return True

    def renew(self, now: float) -> None:
        """The peer proved its progress in another way (a commit or an ack of its own)."""
        self.until = now + self.lease_s

    def expired(self, now: float) -> bool:
        return now >= self.until
