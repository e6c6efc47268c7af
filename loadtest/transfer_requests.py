"""Requests to stacks that differ in how KV of a prompt gets to its decode worker: computed there, or moved somehow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any

import httpx

from loadtest.client import Outcome, run_load
from loadtest.machine import ForeignLoad
from loadtest.own_stack import OwnStack, own_stack
from loadtest.workload import Job
from shared.contracts.errors import SettingsError, Unavailable
from shared.telemetry import attributes as a

WAYS: dict[str, dict[str, object]] = {
    "local": {"workers.prefill": 0},
    "shared memory": {"workers.prefill": 1, "kv.transfer": "shared-memory"},
    "TCP": {"workers.prefill": 1, "kv.transfer": "tcp"},
}
OUTPUT_TOKENS = 8
FIRST_ID, VOCABULARY = 300, 40_000
TRACE_S = 10.0
SPANS = {"scheduler.place", "decode.run"}
"""Those that every request has."""


def measure(count: int, prompt_tokens: int, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`count` requests to each stack, one at a time and in turn; the first of each is not counted.

    Raises:
        SettingsError: one of `settings` is not NAME=VALUE.
        Unavailable: a stack did not start, or a request failed.
    """
    more = dict(_parted(setting) for setting in settings)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        stacks = {name: stack.enter_context(own_stack({**way, **more})) for name, way in WAYS.items()}
        for number in range(count + 1):
            for name, running in stacks.items():
                row = _request(running, number, prompt_tokens)
                if number:
                    rows[name].append(row)
    return {name: figures(found) for name, found in rows.items()}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of a stack's requests; of transfers, those of the requests that had one. Pure."""
    moved = [row for row in rows if row["bytes"]]

    def middle(name: str, of: Sequence[Mapping[str, Any]]) -> float:
        return median(row[name] for row in of) if of else 0.0

    return {
        "requests": len(rows),
        "handed_off": len(moved),
        "ttft_s": middle("ttft_s", rows),
        "queue_s": middle("queue_s", rows),
        "transfer_s": middle("transfer_s", moved),
        "transfer_queue_s": middle("transfer_queue_s", moved),
        "bytes": middle("bytes", moved),
        "foreign_cores": middle("foreign_cores", rows),
    }


def lines_of(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table. Pure."""
    heads = ("handed off", "TTFT ms", "queue ms", "transfer ms", "its queue", "MB", "others")
    yield f"{'requests':16}" + "".join(f"{head:>13}" for head in heads)
    for name, row in found.items():
        cells = (
            f"{row['handed_off']} of {row['requests']}",
            *(f"{1000 * row[key]:.1f}" for key in ("ttft_s", "queue_s", "transfer_s", "transfer_queue_s")),
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['foreign_cores']:.2f}",
        )
        yield f"{name:16}" + "".join(f"{cell:>13}" for cell in cells)


def _parted(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals:
        raise SettingsError(f"--set {setting}: it is NAME=VALUE", param="--set")
    return name, value


def _request(running: OwnStack, number: int, prompt_tokens: int) -> dict[str, Any]:
    """One request whose prompt no other one shares, and what its trace tells."""
    prompt = tuple(FIRST_ID + (number * 7919 + i * 104_729) % VOCABULARY for i in range(prompt_tokens))
    load = ForeignLoad(running.pid)
    outcomes, _ = asyncio.run(
        run_load(running.url, running.api_key, running.models()[0], [Job(number, 0.0, prompt, OUTPUT_TOKENS)])
    )
    (outcome,) = outcomes
    others = load.cores()
    if outcome.error or outcome.first_s is None:
        raise Unavailable(f"a request failed: {outcome.error or 'it had no text'}")
    return {"ttft_s": outcome.first_s, "foreign_cores": others, **_told(running, outcome)}


def _told(running: OwnStack, outcome: Outcome) -> dict[str, float]:
    spans = _spans(running, outcome.id)
    placed, pulled = spans["scheduler.place"], spans.get("handoff.pull", {})
    return {
        "queue_s": float(placed.get(a.QUEUE_S, 0.0)),
        "transfer_s": float(pulled.get(a.COPY_S, 0.0)),
        "transfer_queue_s": float(pulled.get(a.QUEUE_S, 0.0)),
        "bytes": float(pulled.get(a.BYTES, 0.0)),
    }


def _spans(running: OwnStack, request_id: str) -> dict[str, dict[str, Any]]:
    """Attributes of a finished request's spans by name. Raises Unavailable when they do not come."""
    deadline = time.monotonic() + TRACE_S
    headers = {"Authorization": f"Bearer {running.admin_key}"}
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, KeyError, ValueError):
            answer = httpx.get(f"{running.url}/baton/traces/{request_id}", headers=headers, timeout=10)
            spans = {span["name"]: span["attributes"] for span in answer.raise_for_status().json()["spans"]}
            if spans.keys() >= SPANS:
                return spans
        time.sleep(0.1)
    raise Unavailable(f"the trace of {request_id} did not come")
