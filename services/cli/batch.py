"""`./baton batch …`: submits files of requests to a running stack, follows them, fetches what came out."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.cli.batch_client import Batch, BatchClient, first_url
from services.cli.batch_view import ENDED, details, error_lines, progress_line, table
from services.cli.connection import add_connection_options, connection
from services.cli.words import sentence
from shared.contracts.errors import BatonError, Conflict, InvalidInput, Unavailable
from shared.lifecycle.plain_text import json_text

POLL_S = 0.5
VALIDATION_S = 60.0
"""How long `submit` waits to say whether the file is in order."""
PATIENCE_S = 60.0
"""How long a watch goes on while nobody answers."""
QUIET_S = 10.0
"""Without a terminal a watch says so often how far it is."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code: 0, 1 on an error or a batch that did not complete, 130 on Ctrl-C."""
    options = _parser().parse_args(argv)
    command: Callable[[BatchClient, argparse.Namespace], int] = options.command
    try:
        return command(BatchClient(connection(options, os.environ)), options)
    except BatonError as exc:
        print(f"baton batch: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nthe batch goes on without this command", file=sys.stderr)
        return 130


# ---------------------------------------------------------------------------------------------- commands


def submit(client: BatchClient, options: argparse.Namespace) -> int:
    """Upload a file and begin a batch over it; wait until its lines are validated, or with --watch to its end."""
    path = Path(options.file)
    metadata = dict(_pair(text) for text in options.metadata)
    endpoint = options.endpoint or first_url(path)
    file_id = client.upload(path)
    try:
        batch = client.create(file_id, endpoint, metadata)
    except BatonError:
        with suppress(BatonError):
            client.delete_file(file_id)  # nobody else knows of it
        raise
    if not options.json:
        print(f"batch {batch['id']} over {path.name}", file=sys.stderr)
    if options.watch:
        return _watch(client, batch, options, str(path))
    deadline = time.monotonic() + VALIDATION_S
    while batch["status"] == "validating" and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)
        batch = client.get(batch["id"])
    if batch["status"] == "failed":
        return _failed(batch, options, str(path))
    _print(batch, options, f"{progress_line(batch)}\nfollow it: ./baton batch watch {batch['id']}")
    return 0


def status(client: BatchClient, options: argparse.Namespace) -> int:
    """Show one batch, the newest by default."""
    batch = client.get(options.id) if options.id else _newest(client)
    _print(batch, options, details(batch))
    return 0


def watch(client: BatchClient, options: argparse.Namespace) -> int:
    """Follow a batch to its end."""
    return _watch(client, client.get(options.id) if options.id else _newest(client), options)


def cancel(client: BatchClient, options: argparse.Namespace) -> int:
    """Cancel a batch; what has finished is kept."""
    batch = client.cancel(options.id)
    _print(batch, options, progress_line(batch))
    return 0


def list_batches(client: BatchClient, options: argparse.Namespace) -> int:
    """List batches, newest first."""
    batches = client.newest(options.limit)
    if options.json:
        print(json.dumps(batches))
    else:
        print(table(batches) if batches else "no batches yet; ./baton batch submit FILE.jsonl begins one")
    return 0


def results(client: BatchClient, options: argparse.Namespace) -> int:
    """Write a batch's output lines, then its error lines."""
    batch = client.get(options.id) if options.id else _newest(client)
    if batch["status"] not in ENDED:
        raise Conflict(
            f"the batch is {batch['status']}; its files come when it ends: ./baton batch watch {batch['id']}"
        )
    wanted = {"output": ("output_file_id",), "errors": ("error_file_id",)}
    keys = wanted.get(options.only, ("output_file_id", "error_file_id"))
    files = [batch[key] for key in keys if batch[key]]
    if batch["status"] == "failed":
        return _failed(batch, options)
    if options.output:
        _write(client, files, Path(options.output))
    else:
        for file_id in files:
            _to_stdout(client.content(file_id))
    counts = batch["request_counts"]
    print(f"{counts['completed']} completed, {counts['failed']} failed", file=sys.stderr)
    return 0


# ---------------------------------------------------------------------------------------------- parts


def _watch(client: BatchClient, batch: Batch, options: argparse.Namespace, file: str = "") -> int:
    screen = _Screen(options.json)
    screen.show(batch)
    heard = time.monotonic()
    while batch["status"] not in ENDED:
        time.sleep(POLL_S)
        try:
            batch = client.get(batch["id"])
        except Unavailable:
            if time.monotonic() - heard > PATIENCE_S:
                raise
            continue
        heard = time.monotonic()
        screen.show(batch)
    screen.end()
    if batch["status"] == "failed":
        return _failed(batch, options, file, shown=True)
    if not options.json:
        print(details(batch, file))
        if batch["output_file_id"] or batch["error_file_id"]:
            print(f"results   ./baton batch results {batch['id']} -o FILE")
    return 0 if batch["status"] == "completed" else 1


def _failed(batch: Batch, options: argparse.Namespace, file: str = "", *, shown: bool = False) -> int:
    if options.json and not shown:
        print(json.dumps(batch))
    for line in error_lines(batch, file):
        print(line, file=sys.stderr)
    print("baton batch: the batch failed; nothing of it was run", file=sys.stderr)
    return 1


def _newest(client: BatchClient) -> Batch:
    found = client.newest(1)
    if not found:
        raise InvalidInput("no batches yet; ./baton batch submit FILE.jsonl begins one")
    return found[0]


def _write(client: BatchClient, files: Sequence[str], path: Path) -> None:
    """All or nothing: a broken connection leaves an older file as it was."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as out:
                for file_id in files:
                    out.writelines(client.content(file_id))
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as exc:
        raise InvalidInput(f"{path}: {exc.strerror or exc}", param=str(path)) from exc


def _to_stdout(pieces: Iterable[bytes]) -> None:
    """The bytes as they are; on a terminal with nothing it would obey."""
    if sys.stdout.isatty():
        for text in codecs.iterdecode(pieces, "utf-8", "replace"):
            print(json_text(text), end="")
    else:
        sys.stdout.buffer.writelines(pieces)
    sys.stdout.flush()


def _print(batch: Batch, options: argparse.Namespace, text: str) -> None:
    print(json.dumps(batch) if options.json else text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"--metadata {text}: expected NAME=VALUE")
    return name, value


class _Screen:
    """Progress: one line redrawn on a terminal, else a line at each change of status and now and then."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._tty = sys.stderr.isatty() and not as_json
        self._last: Any = None
        self._said = 0.0
        self._width = 0

    def show(self, batch: Batch) -> None:
        """Show a batch as it stands."""
        if self._json:
            key = (batch["status"], batch["request_counts"])
            if key != self._last:
                print(json.dumps(batch), flush=True)
            self._last = key
            return
        line = progress_line(batch)
        if self._tty:
            line = line[: max(1, shutil.get_terminal_size().columns - 1)]  # one that wraps could not be redrawn
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif batch["status"] != self._last or time.monotonic() - self._said > QUIET_S:
            print(line, file=sys.stderr, flush=True)
            self._said = time.monotonic()
        self._last = batch["status"]

    def end(self) -> None:
        """No more lines."""
        if self._tty:
            print(file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton batch", description="Batches of requests on the running stack.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., int], summary: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=summary, description=sentence(summary))
        found.set_defaults(command=command)
        found.add_argument("--json", action="store_true", help="print what the server says, as JSON lines")
        add_connection_options(found)
        return found

    found = add("submit", submit, "upload a file of requests, one JSON object a line, and begin a batch over it")
    found.add_argument("file", metavar="FILE.jsonl", help="as for OpenAI's batch API")
    found.add_argument("--watch", action="store_true", help="follow it to its end")
    found.add_argument("--endpoint", metavar="URL", help="default: the url of the first line")
    found.add_argument("--metadata", action="append", default=[], metavar="NAME=VALUE", help="noted with the batch")
    for name, command, summary in (
        ("status", status, "show a batch, the newest by default"),
        ("watch", watch, "follow a batch to its end, the newest by default"),
    ):
        add(name, command, summary).add_argument("id", nargs="?", metavar="ID")
    summary = "write the output lines of a batch that has ended, then its error lines; the newest by default"
    found = add("results", results, summary)
    found.add_argument("id", nargs="?", metavar="ID")
    found.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    found.add_argument("--only", choices=("output", "errors"), help="one of the two files alone")
    add("cancel", cancel, "cancel a batch; what has finished is kept").add_argument("id", metavar="ID")
    found = add("list", list_batches, "list batches, newest first")
    found.add_argument("--limit", type=_limit, default=20, metavar="N", help="most batches (default 20)")
    return parser


def _limit(text: str) -> int:
    if not (text.isdigit() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)
