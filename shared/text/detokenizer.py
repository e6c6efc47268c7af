"""Token ids of one output turned into text as they come.

Pure, and knows nothing about models or stop strings: it only needs the bytes of a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

_DECODER: type[codecs.BufferedIncrementalDecoder] = codecs.getincrementaldecoder("utf-8")  # type: ignore[assignment]


class Detokenizer:
    """Incremental decoder of one token stream.

    The pieces joined are exactly `b"".join(map(token_bytes, ids)).decode("utf-8", "replace")`, however the ids are
    split over calls: bytes of an unfinished code point are held back, invalid ones become U+FFFD.

    Args:
        token_bytes: the bytes a token id stands for; `b""` for one that shows no text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _DECODER("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a code point is unfinished."""
        data = b"".join(map(self._token_bytes, token_ids))
        if data.isascii() and not self._decoder.buffer:
            return data.decode("ascii")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is still held, as U+FFFD; call once, when no more tokens come."""
        return self._decoder.decode(b"", final=True)
