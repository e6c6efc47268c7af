"""How much longer steps that verify drafts take than the step-time model says, beside how plain decodes do. Pure.

The model knows rows and not what else differs: an output head that is read quickly for a few rows alone, steps laid out
anew. What it does not know must not make speculation slower than none.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1
"""Of a step in the mean so far."""
_FADES = 0.001
"""Of the way back to plain decodes, with each of them: what was dear is tried again, once in about a hundred."""
_FURTHEST = 3.0
"""A step that took longer by more than this was kept waiting by others."""


@dataclass(slots=True)
class DraftCosts:
    """Means of seconds taken by seconds predicted."""

    _plain: float = 1.0
    _verifying: float = 1.0

    def took(self, verifies: bool, seconds: float, predicted_s: float) -> None:
        """A step of decodes has ended."""
        if seconds <= 0.0 or predicted_s <= 0.0:
            return
        times = min(_FURTHEST, max(1.0 / _FURTHEST, seconds / predicted_s))
        if verifies:
            self._verifying += _WEIGHT * (times - self._verifying)
        else:
            self._plain += _WEIGHT * (times - self._plain)
            self._verifying += _FADES * (self._plain - self._verifying)

    @property
    def dearer(self) -> float:
        """Times that a step which verifies takes beyond what is predicted; at least 1."""
        return max(1.0, self._verifying / self._plain)
