"""Request bodies with a limit: what is over it is never kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

from shared.contracts.errors import BodyTooLarge, InvalidInput


async def read_body(chunks: AsyncIterable[bytes], declared: str | None, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Args:
        declared: the Content-Length header, if there is one; a chunked body has none and is counted as it comes.
        limit: most bytes.
        timeout_s: for the whole body, seconds.

    Raises:
        BodyTooLarge: at the first byte over the limit.
        InvalidInput: it did not come in time.
    """
    if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                parts.append(chunk)
    except TimeoutError as exc:
        raise InvalidInput(f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from exc
    return b"".join(parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes")
