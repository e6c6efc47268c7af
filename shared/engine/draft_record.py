"""What a sequence's drafts have come to, and when it looks for the next one. Pure.

Chances are kept by how much was alike before the draft: a long match is right far more often than a short one. Where
drafts do not pay, or nothing is found that is right, the sequence pauses, the longer the longer that lasts: it then
decodes plainly, at no cost, and tries again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LONG_MATCH = 8
"""Tokens alike from which on a match is a long one."""
FIRST_CHANCES = (0.5, 0.8)
"""Of a drafted token to be right, of short and of long matches, until something is known."""
_WEIGHT = 0.15
"""Of a drafted token in the chance so far."""
_MOST_CHANCE = 0.98
_RECOVERY = 0.03
"""Of the way back to what is thought at first, for each short match that was not tried."""
_DRY_LOOKS, _MOST_DRY_PAUSE = 8, 32
_LEAST_PAUSE, _MOST_PAUSE = 16, 256


@dataclass(slots=True)
class DraftRecord:
    """Of one sequence. Tokens are those of its text, which `at` counts."""

    drafted: int = 0  # tokens verified so far
    accepted: int = 0
    resumes_at: int = 0  # looks for no draft before its text has so many tokens
    _chances: list[float] = field(default_factory=lambda: list(FIRST_CHANCES))
    _looks: int = 0  # that brought nothing, in a row
    _pause: int = _LEAST_PAUSE  # the next one for drafts that do not pay

    def chance(self, match: int) -> float:
        """Of a drafted token behind so many alike to be right if those before it are."""
        return self._chances[match >= LONG_MATCH]

    @property
    def best_chance(self) -> float:
        """Of any draft."""
        return max(self._chances)

    def verified(self, match: int, drafted: int, accepted: int, at: int) -> None:
        """Of a draft behind so many tokens alike, the last of them token `at`, the first `accepted` were right."""
        self.drafted += drafted
        self.accepted += accepted
        kind = match >= LONG_MATCH
        for right in (1.0,) * accepted + (0.0,) * (drafted > accepted):
            self._chances[kind] += _WEIGHT * (right - self._chances[kind])
        self._chances[kind] = min(self._chances[kind], _MOST_CHANCE)
        if accepted:
            self._pause, self._looks = _LEAST_PAUSE, 0
        else:
            self.found_nothing(at)

    def found_nothing(self, at: int) -> None:
        """There was nothing to draft behind token `at`, or nothing that was right."""
        self._looks += 1
        if self._looks >= _DRY_LOOKS:
            self.resumes_at = at + min(self._looks // 2, _MOST_DRY_PAUSE)

    def does_not_pay(self, match: int, at: int) -> None:
        """What there was to draft behind so many tokens alike was not worth a step's longer time.

        A short match may become a long one: it is looked at again when it could be. A long one is given a chance again
        after a pause.
        """
        if match < LONG_MATCH:
            self.found_nothing(at)
            self.resumes_at = max(self.resumes_at, at + LONG_MATCH - match)
            self._chances[0] += _RECOVERY * (FIRST_CHANCES[0] - self._chances[0])
        else:
            self.resumes_at = at + self._pause
            self._pause = min(2 * self._pause, _MOST_PAUSE)
            self._chances[1] = max(self._chances[1], FIRST_CHANCES[1])
