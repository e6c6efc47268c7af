"""Tokens of one output choice to the text its client may see: detokenized, stop strings cut. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.text.detokenizer import Detokenizer
from shared.text.stop_strings import StopStrings


class ChoiceText:
    """The text of one choice.

    Args:
        token_bytes: the bytes a token id stands for.
        stops: stop strings; none of them appears in the text, unless it is kept.
        keep_stop: the text ends with the stop string that ended it.
        min_tokens: stop strings are looked for behind so many tokens.
        keep_ends: fill `ends`.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str],
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        keep_ends: bool = False,
    ) -> None:
        self.ends: list[int] = []
        """Code points that were complete after each token, stop strings and what is held back included."""
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(stops) if stops else None
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._keep_ends = keep_ends
        self._ready: list[str] = []
        self._count = 0
        self._length = 0

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take the next tokens. Returns how many output tokens are kept, once a stop string is complete."""
        if self._stops is None and not self._keep_ends:
            self._ready.append(self._detokenizer.push(token_ids))
            return None
        for token_id in token_ids:
            # one by one: a match must know its token
            if (kept := self._push_one(token_id)) is not None:
                return kept
        return None

    def _push_one(self, token_id: int) -> int | None:
        text = self._detokenizer.push((token_id,))
        self._count += 1
        if self._keep_ends:
            self._length += len(text)
            self.ends.append(self._length)
        if self._stops is None or self._count <= self._min_tokens:
            self._ready.append(text)
            return None
        self._ready.append(self._stops.push(self._count - 1, text))
        match = self._stops.match
        if match is None:
            return None
        if self._keep_stop:
            self._ready.append(match.stop)
        return match.num_tokens

    def finish(self) -> None:
        """No more tokens come: what was held back is text after all, unless a stop string ended it."""
        if self._stops is None:
            self._ready.append(self._detokenizer.flush())
        elif self._stops.match is None:
            self._ready.append(self._stops.push(self._count, self._detokenizer.flush()))
            self._ready.append(self._stops.flush())

    @property
    def stopped_by(self) -> str:
        """The stop string that ended it; "" when none did."""
        match = self._stops.match if self._stops is not None else None
        return "" if match is None else match.stop

    def take(self) -> str:
        """The text that became ready since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text
