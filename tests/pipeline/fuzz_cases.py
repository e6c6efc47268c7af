"""Requests broken at random, for every route that takes a body. Pure: the same random numbers make the same request."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from shared.ingress.field_docs import MEANING
from tests.pipeline.fuzz_requests import GOOD, with_model

Random = random.Random
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Case:
    """A request and how its bytes go out.

    Attributes:
        chunks: sizes of the chunks of a chunked body; empty: it has a length.
        cuts: where in the bytes of the whole request a write ends.
        short: so many bytes are missing at the end when the client stops sending; 0: none.
    """

    path: str
    body: bytes
    headers: Headers = field(default_factory=list)
    chunks: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    short: int = 0

    @property
    def raw(self) -> bytes:
        """All bytes of the request, as if nothing were missing."""
        head = [b"POST %b HTTP/1.1" % self.path.encode(), b"host: x"]
        framing = (b"transfer-encoding", b"chunked") if self.chunks else (b"content-length", b"%d" % len(self.body))
        head += [name + b": " + value for name, value in (*self.headers, framing)]
        return b"\r\n".join([*head, b"", b""]) + (self._chunked() if self.chunks else self.body)

    def _chunked(self) -> bytes:
        parts, at, sizes = [], 0, iter(_cycled(self.chunks))
        while at < len(self.body):
            piece = self.body[at : at + next(sizes)]
            parts.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at += len(piece)
        return b"".join([*parts, b"0\r\n\r\n"])


def _cycled(sizes: tuple[int, ...]) -> Iterator[int]:
    while True:
        yield from sizes


FORM = "/v1/files"
WEIGHTS = {"/v1/chat/completions": 4, "/v1/completions": 4, "/v1/responses": 3, "/v1/messages": 3, FORM: 2}
NAMES = sorted(
    {
        *MEANING,
        *("input", "instructions", "text", "reasoning", "include", "previous_response_id", "background", "truncation"),
        *("system", "stop_sequences", "thinking", "cache_control", "type", "role", "content", "tokens", "name", "id"),
        *("unheard_of", "__proto__", "", "\x00", "é"),
    }
)

# ---------------------------------------------------------------------------------------------- junk


@dataclass(frozen=True)
class Raw:
    """Text that stands in the JSON as it is."""

    text: str


NUMBERS = (
    *(0, 1, -1, 2, 3.0, 0.5, 1.5, -0.0, 2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**30, 1e308, 5e-324),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0", "1E400", "9" * 400, "0.1e-9999")),
)
TEXTS = (
    *("", " ", "a", "\x00", "\n\r\t", "\x7f", "\u2028", "🫠", "👨\u200d👩", "é" * 300, "x" * 5000, "json", "auto"),
    *("none", "required", "user", "assistant", "tool", "text", "5", "true", "data: [DONE]", "\n\ndata: {}\n\n", "%s%n"),
    *("../../etc/passwd", "'; --", "<script>", "{{x}}", "{% for i in x %}", "<|im_end|>", "<tool_call>", "</think>"),
    Raw('"\\ud800"'),
    Raw('"\\udfff\\ud800"'),
    Raw('"\\u0000"'),
)
BROKEN = tuple(map(Raw, ("01", "1.", "+1", "0x10", "1_0", "nan", "9" * 5000, '"\\x"', '"open', "'a'", "", "[1,]")))


def junk(rng: Random, depth: int = 0) -> Any:
    """Any JSON value, or what only looks like one."""
    if rng.random() < 0.01:
        return rng.choice(BROKEN)
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind <= 3:
        return rng.choice(TEXTS)
    if kind == 4:
        return [junk(rng, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
    if kind == 5:
        return {rng.choice(NAMES): junk(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3)))}
    return _nested(rng)


def _nested(rng: Random) -> Raw:
    depth = rng.choice((3, 50, 99, 100, 101, 1000, 40_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"type":', "}]")))
    return Raw(opening * depth + "1" + closing * depth)


# ---------------------------------------------------------------------------------------------- mutations

Spot = tuple[Any, Any]
"""A container and the key or index of a value in it."""


def _spots(value: Any) -> list[Spot]:
    found: list[Spot] = []
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(value, key), *_spots(value[key])]
    return found


def _replace(rng: Random, body: Any, spot: Spot) -> None:
    spot[0][spot[1]] = junk(rng)


def _remove(rng: Random, body: Any, spot: Spot) -> None:
    del spot[0][spot[1]]


def _add(rng: Random, body: Any, spot: Spot) -> None:
    where = rng.choice((body, spot[0]))
    if isinstance(where, dict):
        where[rng.choice(NAMES)] = junk(rng)
    else:
        where.insert(rng.randrange(len(where) + 1), junk(rng))


def _wrap(rng: Random, body: Any, spot: Spot) -> None:
    value = spot[0][spot[1]]
    spot[0][spot[1]] = rng.choice(([value], {"text": value}, [value, value], str(value), {rng.choice(NAMES): value}))


def _swap(rng: Random, body: Any, spot: Spot) -> None:
    other = rng.choice(_spots(body))
    spot[0][spot[1]] = deepcopy(other[0][other[1]])


MAX_CHARS = 1_000_000
MAX_REPEATED_CHARS = 100_000


def _repeat(rng: Random, body: Any, spot: Spot) -> None:
    value, times = spot[0][spot[1]], rng.choice((2, 5, 100, 2000))
    if isinstance(value, str | list):
        spot[0][spot[1]] = value * min(times, 1 + MAX_REPEATED_CHARS // (1 + len(str(value))))


def _borrow(rng: Random, body: Any, spot: Spot) -> None:
    """A field of another route's request."""
    other = rng.choice(GOOD[rng.choice(list(GOOD))])
    if other:
        name = rng.choice(list(other))
        body[name] = deepcopy(other[name])


MUTATIONS: tuple[Callable[[Random, Any, Spot], None], ...] = (
    *(_replace, _replace, _replace, _remove, _add, _add),
    *(_wrap, _swap, _repeat, _borrow),
)


def _mutated(rng: Random, body: dict[str, Any]) -> dict[str, Any]:
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 1, 2, 2, 5))):
        changed = deepcopy(body)
        if spots := _spots(changed):
            rng.choice(MUTATIONS)(rng, changed, rng.choice(spots))
        if not _fits(changed):
            break
        body = changed
    return body


def _fits(value: Any) -> bool:
    """Whether it is small enough to be changed further: what was repeated and then grows does so everywhere."""
    left, waiting = MAX_CHARS, [value]
    while waiting and left > 0:
        item = waiting.pop()
        if isinstance(item, Raw | str):
            left -= len(item.text if isinstance(item, Raw) else item)
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
        left -= 1
    return left > 0


def dumped(rng: Random, value: Any) -> str:
    """JSON, with `Raw` texts as they are; now and then a name stands twice in an object."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}: {dumped(rng, item)}" for key, item in value.items()]
        if pairs and rng.random() < 0.03:
            pairs.insert(rng.randrange(len(pairs) + 1), rng.choice(pairs))
        if pairs and rng.random() < 0.03:
            pairs.append(f"{json.dumps(rng.choice(list(value)))}: {dumped(rng, junk(rng))}")
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(dumped(rng, item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def _encoded(rng: Random, text: str) -> bytes:
    """Bytes of a text that may be no Unicode; rarely not in UTF-8, or damaged."""
    kind = rng.randrange(60)
    if kind == 0:
        return text.encode("utf-16", "surrogatepass")
    if kind == 1:
        return b"\xef\xbb\xbf" + text.encode("utf-8", "surrogatepass")
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if kind == 2:
        raw += rng.choice((b" ", b"\n\n", b"\x00", b"{}", b"]", b"\xff"))
    if kind == 3:
        return bytes(raw[: rng.randrange(len(raw) + 1)])
    if kind <= 5:
        at = rng.randrange(len(raw) + 1)
        raw[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
    if kind == 6:
        return rng.choice((b"", b"null", b"[]", b'"a"', b"1", b"NaN", b"{", b"\x1f\x8b", b" " * 1000))
    return bytes(raw)


# ---------------------------------------------------------------------------------------------- forms

BOUNDARY = b"b"
PART = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}\n'


def _form(rng: Random) -> tuple[bytes, bytes]:
    """(content type, body) of an upload."""
    parts = [
        PART % (b"purpose", b"", rng.choice((b"batch",) * 4 + (b"", b"fine-tune", b"x" * 2000, b"\xff"))),
        PART % (b"file", b'; filename="in.jsonl"', rng.choice((LINE, LINE * 50, b"", b"\x00\xff", rng.randbytes(99)))),
    ]
    extra = (
        PART % (b"expires_after[anchor]", b"", b"created_at"),
        PART % (b"expires_after[seconds]", b"", rng.choice((b"3600", b"-1", b"1e9", b"9" * 99, "٣".encode()))),
        PART % (rng.choice((b"unheard_of", b"file", b"purpose", b"", b"\xff")), b"", b"x"),
        PART % (b"file", b'; filename="' + rng.choice((b"", b"x" * 3000, "é".encode(), b"\xff", b"../a")) + b'"', b"x"),
    )
    parts += [part for part in extra if rng.random() < 0.2]
    if rng.random() < 0.2:
        parts.pop(rng.randrange(len(parts)))
    rng.shuffle(parts)
    body = bytearray(b"".join(parts) + b"--b--\r\n")
    if rng.random() < 0.3:
        at = rng.randrange(len(body))
        body[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
    kinds = (b"multipart/form-data; boundary=b",) * 9 + (
        *(b"multipart/form-data", b"multipart/form-data; boundary=", b'multipart/form-data; boundary="b"'),
        *(b"multipart/form-data; boundary=" + b"b" * 300, b"application/json", b"multipart/mixed; boundary=b", b""),
    )
    return rng.choice(kinds), bytes(body)


# ---------------------------------------------------------------------------------------------- headers and splits

CONTENT_TYPES = (b"application/json",) * 12 + (
    *(b"application/json; charset=utf-16", b"text/plain", b"application/x-www-form-urlencoded", b"", b";", b"\xff"),
    *(b"multipart/form-data; boundary=x", b"application/xml", b"application/json, text/plain"),
)
HEADERS: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (b"idempotency-key", (b"k1", b"k2", b"k3", b"k1", b"", b" ", b"a b", b"x" * 255, b"x" * 256, b"\xe9", b"\t")),
    (b"last-event-id", (b"1-0", b"1-1-3", b"2-9-9f", b"", b"x", b"1-", b"9" * 40, b"1-1-99999999999", b"\xff")),
    (b"x-request-id", (b"mine", b"x" * 500, b"\xe9\xff", b"", b"a, b")),
    (b"traceparent", (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-0-0-0", b"\xff", b"x" * 400)),
    (b"tracestate", (b"a=b", b"=" * 50, b"\xff")),
    (b"baggage", (b"a=b", b"%zz", b"\xff")),
    (b"accept", (b"text/event-stream", b"*/*;q=\xff", b"")),
    (b"accept-encoding", (b"gzip, br", b"identity;q=0")),
    (b"anthropic-version", (b"2023-06-01", b"", b"\xff")),
    (b"expect", (b"100-continue", b"200-ok")),
    (b"cookie", (b"a=b", b"\xff")),
    (b"origin", (b"https://x", b"null")),
    (b"x-forwarded-for", (b"1.2.3.4", b"\xff", b"::1, x")),
    (b"range", (b"bytes=0-1",)),
    (b"if-none-match", (b"*",)),
    (b"x-api-key", (b"key-a", b"key-b", b"")),
)


def _headers(rng: Random) -> Headers:
    found: Headers = [(b"authorization", b"Bearer key-a")]
    for _ in range(rng.choice((0, 0, 0, 1, 2, 4))):
        name, values = rng.choice(HEADERS)
        found.append((name, rng.choice(values)))
    return found


def make_case(rng: Random) -> Case:
    """One request: a good one, most often with something changed."""
    paths = [*GOOD, FORM]
    (path,) = rng.choices(paths, [WEIGHTS.get(path, 1) for path in paths])
    headers = _headers(rng)
    if path == FORM:
        kind, body = _form(rng)
    else:
        good = rng.choice(GOOD[path])
        body = _encoded(rng, dumped(rng, _mutated(rng, with_model(path, good))))
        kind = rng.choice(CONTENT_TYPES)
    headers.append((b"content-type", kind))
    if rng.random() < 0.03:
        body = gzip.compress(body, mtime=0)
        headers.append((b"content-encoding", b"gzip"))
    if rng.random() < 0.002:
        body += b" " * (5 << 20)
    chunks = rng.choice(((), (), (), (1,), (7, 1), (4096,), (1, 100, 3)))
    if len(body) > 20_000:
        chunks = chunks and (4096,)
    case = Case(path, body, headers, chunks)
    size = len(case.raw)
    cuts = tuple(sorted(rng.randrange(size + 1) for _ in range(rng.choice((0, 0, 1, 3)))))
    short = rng.randrange(1, size) if rng.random() < 0.03 else 0
    return Case(path, body, headers, chunks, cuts, short)
