"""JSON whose only line ends are those around it. Pure."""

from __future__ import annotations

_OTHERS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def in_lines(json: bytes) -> bytes:
    """JSON of events or of a file's lines, in UTF-8, with U+2028, U+2029 and U+0085 as escapes.

    They end no line by the protocol, but do for many a client that reads text by lines, `httpx.Response.iter_lines`
    and `str.splitlines` among them, which would take half an event for one.
    """
    if json.isascii():
        return json
    for raw, escaped in _OTHERS:
        json = json.replace(raw, escaped)
    return json
