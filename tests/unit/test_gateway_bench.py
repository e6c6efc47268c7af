"""The gateway's bench: what its client reads of raw bytes, and the figures made of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.gateway_client import Client, Heard
from loadtest.gateway_notes import Notes, shares_of
from loadtest.gateway_report import latency_of, streams_of, text_of

HEAD = b"HTTP/1.1 200 OK\r\ndate: x\r\nx-request-id: req-10\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Wire:
    def write(self, data: bytes) -> None:
        pass


async def heard_of(parts: list[bytes]) -> Heard:
    client = Client()
    client.connection_made(Wire())  # type: ignore[arg-type]
    asking = asyncio.create_task(client.ask(b"GET"))
    await asyncio.sleep(0)
    for part in parts:
        assert not asking.done()
        client.data_received(part)
        await asyncio.sleep(0)
    return await asking


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
async def test_tokens_are_counted_however_the_bytes_are_cut(size: int) -> None:
    body = chunk(TOKEN) + chunk(TOKEN + TOKEN) + chunk(TOKEN + LAST) + b"0\r\n\r\n"
    parts = [HEAD, *(body[first : first + size] for first in range(0, len(body), size))]
    heard = await heard_of(parts)
    assert (heard.status, heard.request_id, len(heard.at), heard.whole) == (200, "req-10", 4, True)


async def test_a_refusal_ends_with_its_length() -> None:
    head = b"HTTP/1.1 401 Unauthorized\r\nx-request-id: req-0\r\ncontent-length: 4\r\n\r\n"
    heard = await heard_of([head, b"{}", b"\r\n"])
    assert (heard.status, heard.whole, heard.at) == (401, False, [])


def test_figures_of_known_times() -> None:
    heard = [
        Heard(sent=10.0, at=[10.004, 10.008], request_id="a", status=200, whole=True),
        Heard(sent=20.0, at=[20.010], request_id="b", status=200, whole=True),  # both tokens in one chunk
    ]
    sent = {"a": [10.001, 10.002, 10.007], "b": [20.003, 20.004, 20.005]}
    figures: dict[str, Any] = latency_of(heard, sent) | streams_of(heard, sent, 2.0, 0.0004)
    assert figures["first_token_p99_ms"] == pytest.approx(10.0)
    assert figures["to_scheduler_p99_ms"] == pytest.approx(3.0)
    assert figures["token_delay_p50_ms"] == pytest.approx(2.0)
    assert figures["token_delay_p99_ms"] == pytest.approx(6.0)
    assert figures["gap_p50_ms"] == pytest.approx(4.0)
    assert (figures["tokens"], figures["tokens_s"]) == (4, 2.0)
    assert figures["gateway_us_a_token"] == pytest.approx(100.0)
    assert figures["chunks_a_token"] == 0.75
    more = {"refused": 900, "gateway_cores": [0.25, 0.25], "foreign_cores": 0.0}
    rows = [{"kind": kind, **figures, **more} for kind in ("alone", "beside wrong keys")]
    text = text_of({"machine": {"cpu": "c", "cores": 2, "date": "d"}, "rows": rows})
    assert "A stream beside 900 refused requests had 100.0% of its rate alone." in text
    assert "0.50" in text


def test_the_own_share_of_known_times() -> None:
    notes = Notes()
    for request_id, start, slow in (("a", 10.0, 0.0), ("b", 20.0, 0.010), ("other", 30.0, 5.0)):
        times = {"came": 0.0, "asked": 0.001, "granted": 0.003, "submitted": 0.0035, "token": 0.006}
        for name, after in {**times, "answered": 0.0065 + slow}.items():
            notes.note(request_id, name, start + after)
            notes.note(request_id, name, start + 99.0)  # the first is kept
    notes.note("no token", "came", 1.0)
    found = shares_of(notes.of, ("a", "b", "no token", "unheard of"))
    assert found["to_policy_p50_ms"] == pytest.approx(1.0)
    assert found["to_submit_p99_ms"] == pytest.approx(0.5)
    assert (found["own_p99_ms"], found["to_client_p99_ms"]) == (pytest.approx(12.0), pytest.approx(10.5))
    assert (found["policy_hop_p50_ms"], found["token_hop_p50_ms"]) == (pytest.approx(2.0), pytest.approx(2.5))
    rows = [{**row, "refused": 0, "gateway_cores": [0.1], "foreign_cores": 0.0} for row in ROWS]
    rows.append({**rows[0], "kind": "own share", **found})
    text = text_of({"machine": {"cpu": "c", "cores": 2, "date": "d"}, "rows": rows})
    assert text.count("own share") == 1
    assert "12.00" in text


ROWS = [
    {
        "kind": kind,
        **dict.fromkeys(("first_token_p50_ms", "first_token_p99_ms", "to_scheduler_p50_ms"), 1.0),
        **dict.fromkeys(("token_delay_p50_ms", "token_delay_p99_ms", "tokens_s", "gateway_us_a_token"), 1.0),
    }
    for kind in ("alone", "beside wrong keys")
]
