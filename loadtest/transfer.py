"""`python -m loadtest.transfer`: how fast KV moves between two processes of this machine, by each way there is.

    pulls      blocks of the default model's size, from another process into a pool here, where each is digested:
               through mapped memory, over TCP on loopback, over TLS, by four sinks at once. In turn, short samples
    requests   with --requests: stacks that compute prompts locally, hand them off through memory, and over TCP. One
               request at a time, to each stack in turn: time to first token, and by its trace transfer and queues

Loopback is no network: over a real one the rate of the link is the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import transfer_requests
from loadtest.machine import processor_s, this_machine
from loadtest.samples import Series, collect
from loadtest.transfer_source import (
    ATTEMPT,
    FINGERPRINT,
    GENERATION,
    GROUPS,
    INCARNATION,
    TOKEN,
    WORKER,
    certificate,
)
from shared.contracts.errors import BatonError, Unavailable
from shared.contracts.ids import BlockGeneration, Incarnation, WorkerId
from shared.contracts.parts import BlockRef, KvEnd
from shared.engine.worker_fake import FakePool
from shared.kv.handoff import Pull, PullItem
from shared.kv.layout import PoolLayout
from shared.kv.tcp_transport import TcpTransport
from shared.kv.transfer import PullResult, SharedMemoryTransport, Transport
from shared.settings.load import ROOT

MEMORY, TCP, TLS = "shared memory", "TCP", "TCP, TLS"
AT_ONCE = 4
CONTENDED = f"TCP, {AT_ONCE} at once"
BLOCKS = 64
"""Of one pull: as many as a hand-off asks for at once."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        report = run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BatonError as exc:
        print(f"transfer: {exc.message}", file=sys.stderr)
        return 1
    print("\n".join(lines_of(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for. Raises Unavailable when a process or a stack fails."""
    report: dict[str, Any] = {"bench": "transfer", "machine": this_machine().body()}
    report["pulls"] = measure_pulls(options.seconds)
    if options.requests:
        report["requests"] = transfer_requests.measure(options.requests, options.prompt_tokens, options.set)
    return report


def measure_pulls(seconds: float, enough: int = 20) -> dict[str, dict[str, float]]:
    """Rates by way: bytes a second, and processor seconds of both processes for each GB."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-transfer-", dir=_memory_folder())))
        source, facts = stack.enter_context(_source(folder))
        own = FakePool(folder, WorkerId("decode-bench"), PoolLayout(GROUPS, (AT_ONCE * BLOCKS,)))
        stack.callback(own.close)
        plain, secure = facts["addresses"]
        ways: dict[str, tuple[list[Transport], str]] = {
            MEMORY: ([SharedMemoryTransport(folder, GROUPS, own.span)], ""),
            TCP: ([TcpTransport(GROUPS, own.span)], plain),
            TLS: ([TcpTransport(GROUPS, own.span, certificate(folder).client_tls())], secure),
            CONTENDED: ([TcpTransport(GROUPS, own.span) for _ in range(AT_ONCE)], plain),
        }
        threads = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        pulls: dict[str, _Pulls] = {}
        for name, (transports, address) in ways.items():
            for transport in transports:
                stack.callback(transport.close)
            pulls[name] = _Pulls(name, transports, _pull(facts, address), threads, source.pid)
        series = collect({name: one.step for name, one in pulls.items()}, seconds, enough)
    return {name: _figures(series[name], one) for name, one in pulls.items()}


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as a table. Pure."""
    machine = report["machine"]
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}"
    yield ""
    yield f"{'pulls':16}{'GB/s':>8}{'CPU s/GB':>11}{'samples':>9}"
    for name, row in report["pulls"].items():
        note = "" if row["idle"] else "  others used the machine"
        yield f"{name:16}{row['bytes_s'] / 1e9:>8.2f}{row['processor_s_gb']:>11.2f}{row['samples']:>9.0f}{note}"
    if "requests" in report:
        yield ""
        yield from transfer_requests.lines_of(report["requests"])


def _figures(series: Series, pulls: _Pulls) -> dict[str, float]:
    return {
        "bytes_s": pulls.size / series.step_s,
        "processor_s_gb": pulls.spent_s / pulls.steps / pulls.size * 1e9,
        "samples": float(len(series.clean if series.idle else series.samples)),
        "idle": float(series.idle),
    }


@dataclass(slots=True)
class _Pulls:
    """Pulls that go on at once, one a transport, each into blocks of its own; and what all of them took."""

    name: str
    transports: Sequence[Transport]
    pull: Pull
    threads: ThreadPoolExecutor
    source: int  # process id
    spent_s: float = 0.0
    steps: int = 0

    @property
    def size(self) -> int:
        """Bytes of a step."""
        return len(self.transports) * BLOCKS * GROUPS[0].span_bytes

    def step(self) -> None:
        """One pull by each. Raises Unavailable when one fails."""
        before = processor_s(self.source) + time.process_time()
        results = list(self.threads.map(self._pull, range(len(self.transports))))
        self.spent_s += processor_s(self.source) + time.process_time() - before
        self.steps += 1
        for result in results:
            if result.error or result.bad:
                raise Unavailable(f"a pull by {self.name} failed: {result.error or 'digests differ'}")

    def _pull(self, number: int) -> PullResult:
        table = (range(number * BLOCKS, (number + 1) * BLOCKS),)
        return self.transports[number].pull(self.pull, table, (BLOCKS,))


def _pull(facts: Mapping[str, Any], address: str) -> Pull:
    digests = [bytes.fromhex(digest) for digest in facts["digests"]]
    refs = (BlockRef(block, BlockGeneration(GENERATION), digest) for block, digest in enumerate(digests))
    items = tuple(PullItem(0, ref.block_id, ref, GROUPS[0].block_size) for ref in refs)
    end = KvEnd(address=address)
    return Pull(1, ATTEMPT, WORKER, Incarnation(INCARNATION), facts["pool"], items, end, TOKEN, FINGERPRINT)


@contextmanager
def _source(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [sys.executable, "-m", "loadtest.transfer_source", str(folder), str(BLOCKS)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise Unavailable("the process whose KV is to be pulled did not start")
        yield process, json.loads(line)
    finally:
        process.stdin.close()
        process.wait(20)


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.transfer", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of the pulls, all ways together (default 30)")
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        metavar="N",
        help="requests to each stack; estimates still choose who computes a prompt",
    )
    parser.add_argument("--prompt-tokens", type=int, default=1500, metavar="N", help="of their prompts (default 1500)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all stacks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
