"""Tokens of one output choice to the text its client may see: detokenized, stop strings cut. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.text.detokenizer import Detokenizer
from shared.text.stop_strings import StopStrings


class ChoiceText:
    """The text of one choice.

    Args:
        token_bytes: the bytes a token id stands for.
        stops: stop strings; none of them appears in the text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(stops) if stops else None
        self._ready: list[str] = []
        self._count = 0

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take the next tokens. Returns how many output tokens are kept, once a stop string is complete."""
        if self._stops is None:
            self._ready.append(self._detokenizer.push(token_ids))
            return None
        for token_id in token_ids:
            # one by one: a match must know its token
            self._ready.append(self._stops.push(self._count, self._detokenizer.push((token_id,))))
            self._count += 1
            if self._stops.match is not None:
                return self._stops.match.num_tokens
        return None

    def finish(self) -> None:
        """No more tokens come: what was held back is text after all, unless a stop string ended it."""
        if self._stops is None:
            self._ready.append(self._detokenizer.flush())
        elif self._stops.match is None:
            self._ready.append(self._stops.push(self._count, self._detokenizer.flush()))
            self._ready.append(self._stops.flush())

    def take(self) -> str:
        """The text that became ready since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text
