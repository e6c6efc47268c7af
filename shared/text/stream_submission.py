"""The way of one request to a scheduler: what is submitted, and how long that is tried."""

from __future__ import annotations

from collections.abc import Sequence

from shared.contracts.attempt import Attempt
from shared.contracts.errors import NO_WORKER, BatonError, Overloaded, Unavailable
from shared.text.stream_choice import StreamRules
from shared.text.stream_effects import SubmitAttempt


class StreamSubmission:
    """Makes the submits of one stream and says whether a refused one is tried again; `now` in monotonic seconds."""

    def __init__(self, prompt: Sequence[int], arrived: float, rules: StreamRules) -> None:
        self.prompt = list(prompt)
        self.numerics = ""
        """Of the worker placed last: the next one should compute the same bits."""
        self.taken = False
        """A scheduler took the request once."""
        self._arrived = arrived
        self._rules = rules
        self._again_at = -1.0  # negative: submitted
        self._first_until = arrived

    def begin(self, now: float) -> None:
        """The first submit is about to be made."""
        self._first_until = now + self._rules.first_submit_s

    def make(self, attempt: Attempt, output: Sequence[int], now: float) -> SubmitAttempt:
        """Submit the epoch of `attempt`, to go on behind `output`."""
        self._again_at = -1.0
        return SubmitAttempt(
            Attempt(attempt.request_id, attempt.epoch),
            [*self.prompt, *output],
            len(self.prompt),
            max(0.0, now - self._arrived),
            self.numerics,
        )

    def retry(self, error: BatonError, now: float, *, first: bool) -> bool:
        """Whether to submit again after `error`, in a while.

        Args:
            first: the failed submit was of the first epoch.
        """
        fresh = first and not self.taken
        meant = isinstance(error, Overloaded) or error.code == NO_WORKER  # by a scheduler, which has waited itself
        passing = isinstance(error, Unavailable | Overloaded) and not (meant and fresh)
        if not passing or (fresh and now + self._rules.resubmit_s > self._first_until):
            return False
        self._again_at = now + self._rules.resubmit_s
        return True

    def placed(self) -> None:
        """A worker has the request: nothing is to be submitted."""
        self._again_at = -1.0

    def due(self, now: float) -> bool:
        """True when it is time to submit again."""
        return 0 <= self._again_at <= now
