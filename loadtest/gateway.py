"""`python -m loadtest.gateway`: what the gateway costs, between clients and a worker that takes no time.

Real gateway processes and a real nats-server, as `./baton up` starts them; policy, scheduler and worker are
`loadtest/gateway_backend.py`, which like the clients runs without a garbage collector. All share the machine. Measured
are the latency a request finds at a steady rate and what of it is the gateway's own, the tokens one process streams,
what a flood of wrong keys costs a stream beside it, and how several processes share a port. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from loadtest.gateway_backend import KEY
from loadtest.gateway_client import Client, Heard, connect, post
from loadtest.gateway_notes import shares_of
from loadtest.gateway_report import latency_of, streams_of, text_of
from loadtest.gateway_stack import GatewayStack, gateway_stack
from loadtest.machine import ForeignLoad, processor_s, this_machine
from shared.contracts.errors import BatonError, Unavailable
from shared.model.fetch import cache_dir, default_model_dir, is_complete

RATE, LATENCY_TOKENS = 100.0, 4
STREAMS, OFFERED = 64, 25_000.0
BYSTANDER_STEP_S = 0.01
FLOOD, FLOOD_CONNECTIONS = 1000.0, 32
WARM_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        report = run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BatonError, OSError) as exc:
        print(f"loadtest.gateway: {exc}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, one after the other.

    Raises:
        Unavailable: something did not start, a stream ended early, or the default model is not there.
    """
    if not is_complete(default_model_dir(cache_dir(os.environ))):
        raise Unavailable("the default model is not there; `./baton up` fetches it")
    rows: list[dict[str, Any]] = []
    seconds = options.seconds
    for number in range(options.rounds):
        _say(f"round {number + 1} of {options.rounds}")
        with gateway_stack(1, {}) as stack:
            rows.append(_row("latency", stack, 0.0, _steady(stack.port, RATE, seconds)))
            rows.append(_row("streams", stack, STREAMS / OFFERED, _streams(stack.port, STREAMS, OFFERED, seconds)))
            flat_out = 4 * OFFERED
            rows.append(_row("flat out", stack, STREAMS / flat_out, _streams(stack.port, STREAMS, OFFERED, seconds)))
            rows.append(_row("alone", stack, BYSTANDER_STEP_S, _bystander(stack.port, seconds, 0.0)))
            rows.append(_row("beside wrong keys", stack, BYSTANDER_STEP_S, _bystander(stack.port, seconds, FLOOD)))
        with gateway_stack(1, {}, timed=True) as stack:
            row, heard = _measured("own share", stack, 0.0, _steady(stack.port, RATE, seconds))
        rows.append(row | shares_of(stack.notes, (one.request_id for one in heard)))
        with gateway_stack(2, {}) as stack:
            rows.append(_row("two gateways", stack, STREAMS / OFFERED, _streams(stack.port, STREAMS, OFFERED, seconds)))
    return {"bench": "gateway", "machine": this_machine().body(), "rows": rows}


def _row(kind: str, stack: GatewayStack, step_s: float, load: Any) -> dict[str, Any]:
    return _measured(kind, stack, step_s, load)[0]


def _measured(kind: str, stack: GatewayStack, step_s: float, load: Any) -> tuple[dict[str, Any], list[Heard]]:
    """Run one load against a backend with such steps, and sum up; what its clients heard."""
    _say(kind)
    with stack.backend(step_s) as sent:
        time.sleep(WARM_S)
        others, before = ForeignLoad(), [processor_s(pid) for pid in stack.gateways]
        with _no_garbage_collector():
            heard, seconds, refused = uvloop.run(load)
        used = [processor_s(pid) - start for pid, start in zip(stack.gateways, before, strict=True)]
        foreign = others.cores()
    whole = [one for one in heard if one.whole]
    if len(whole) < len(heard):
        raise Unavailable(f"{kind}: {len(heard) - len(whole)} of {len(heard)} streams ended early")
    figures = latency_of(heard, sent) | streams_of(heard, sent, seconds, sum(used))
    shares = [round(one / seconds, 3) for one in used]
    row = {"kind": kind, **figures, "refused": refused, "gateway_cores": shares, "foreign_cores": foreign}
    return row, heard


@contextmanager
def _no_garbage_collector() -> Iterator[None]:
    """The clients' own would be in what they measure."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Load = tuple[list[Heard], float, int]
"""Answers, seconds, and how many requests were refused with 401 or 429."""


async def _steady(port: int, rate: float, seconds: float) -> Load:
    """Requests at a steady rate, each on a connection from a pool that grows as needed."""
    loop = asyncio.get_running_loop()
    idle: list[Client] = []
    request = _completion(LATENCY_TOKENS)

    async def one() -> Heard:
        client = idle.pop() if idle else await connect(port)
        heard = await client.ask(request)
        idle.append(client)
        return heard

    await asyncio.gather(*(one() for _ in range(8)))  # connections and code are warm
    began = loop.time()
    tasks = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
        tasks.append(asyncio.create_task(one()))
    heard = await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return list(heard), loop.time() - began, 0


async def _streams(port: int, count: int, rate: float, seconds: float) -> Load:
    """`count` streams at once, of as many tokens as `rate` makes in `seconds`."""
    loop = asyncio.get_running_loop()
    clients = [await connect(port) for _ in range(count)]
    await asyncio.gather(*(client.ask(_completion(2)) for client in clients))
    began = loop.time()
    request = _completion(int(rate * seconds / count))
    heard = await asyncio.gather(*(client.ask(request) for client in clients))
    for client in clients:
        client.close()
    return list(heard), loop.time() - began, 0


async def _bystander(port: int, seconds: float, flood: float) -> Load:
    """One stream, beside so many requests a second with keys nobody has."""
    loop = asyncio.get_running_loop()
    client = await connect(port)
    refused = 0

    async def wrong(share: float) -> None:
        nonlocal refused
        other = await connect(port)
        at = loop.time()
        while True:
            at += 1 / share
            await asyncio.sleep(max(0.0, at - loop.time()))
            heard = await other.ask(post({"model": "x", "prompt": "x"}, secrets.token_hex(16)))
            refused += heard.status in (401, 429)

    tasks = [asyncio.create_task(wrong(flood / FLOOD_CONNECTIONS)) for _ in range(FLOOD_CONNECTIONS if flood else 0)]
    began = loop.time()
    heard = await client.ask(_completion(int(seconds / BYSTANDER_STEP_S)))
    took = loop.time() - began
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    client.close()
    return [heard], took, refused


def _completion(max_tokens: int) -> bytes:
    body: Mapping[str, Any] = {
        "model": "smollm2-135m-instruct",
        "prompt": "Say something about the sea.",
        "max_tokens": max_tokens,
        "stream": True,
    }
    return post(body, KEY)


def _say(text: str) -> None:
    print(f"loadtest.gateway: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (default 5)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all loads (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
