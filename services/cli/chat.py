"""`./baton chat "question"`: asks a running stack and writes the answer as it comes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from services.cli.connection import Connection, add_connection_options, connection
from shared.contracts.errors import BatonError, Unavailable
from shared.lifecycle.plain_text import lines

CONNECT_S, READ_S = 5.0, 120.0


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code: 0, 1 on an error, 130 on Ctrl-C."""
    options = _parser().parse_args(argv)
    if not options.question and sys.stdin.isatty():
        print("the question, then Ctrl-D:", file=sys.stderr)
    try:
        question = " ".join(options.question) or sys.stdin.read()
    except UnicodeDecodeError as exc:
        print(f"baton chat: the question is not {exc.encoding} text", file=sys.stderr)
        return 2
    if not question.strip():
        print("baton chat: no question; give it as an argument or on standard input", file=sys.stderr)
        return 2
    try:
        target = connection(options, os.environ)
        for piece in ask(target, question, options):
            print(lines(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        print()
    except BatonError as exc:
        print(f"\nbaton chat: {exc.message}" if sys.stdout.isatty() else f"baton chat: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def ask(target: Connection, question: str, options: argparse.Namespace) -> Iterator[str]:
    """The answer, piece by piece. Raises BatonError with what the server or the network said."""
    with httpx.Client(base_url=target.url, timeout=httpx.Timeout(READ_S, connect=CONNECT_S)) as client:
        try:
            model = options.model or first_model(client, target)
            body = request_body(model, question, options)
            with client.stream("POST", "/v1/chat/completions", json=body, headers=target.headers()) as response:
                if response.status_code != 200:
                    response.read()
                    raise target.refusal(response)
                yield from read_stream(response.iter_lines())
        except httpx.ConnectError as exc:
            raise Unavailable(f"nothing answers at {target.url}; is it running? ./baton up starts it") from exc
        except httpx.HTTPError as exc:
            raise Unavailable(f"the connection to {target.url} broke ({type(exc).__name__})") from exc


def first_model(client: httpx.Client, target: Connection) -> str:
    """The name of the model served. Raises BatonError."""
    response = client.get("/v1/models", headers=target.headers())
    if response.status_code != 200:
        raise target.refusal(response)
    return str(response.json()["data"][0]["id"])


def request_body(model: str, question: str, options: argparse.Namespace) -> dict[str, Any]:
    """The request: of what a user may leave open, only the temperature goes along unasked."""
    messages = [{"role": "user", "content": question}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    wanted = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
    given = {name: value for name, value in wanted.items() if value is not None}
    return {"model": model, "messages": messages, "stream": True, **given}


def read_stream(lines: Iterator[str]) -> Iterator[str]:
    """Text pieces of an SSE stream. Raises Unavailable for an error frame, or when the stream ends without `[DONE]`."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(f"the answer broke off: {event['error'].get('message', '')}")
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise Unavailable("the answer broke off: the connection ended")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton chat", description="Ask the running stack; the answer streams.")
    parser.add_argument(
        "question", nargs="*", metavar="QUESTION", help="the question; without one it is read from standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--model", metavar="NAME", help="the model; default: the first one served")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.2,
        help="0 is greedy; default 0.2, since a small model rambles at the API's 1.0",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most output tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answer repeatable")
    add_connection_options(parser)
    return parser
