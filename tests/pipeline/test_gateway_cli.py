"""`./baton chat` and `./baton trace` against a gateway behind a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.cli.chat import _parser, request_body
from tests.pipeline.gateway_support import default_output, http_stack

ROOT = Path(__file__).resolve().parents[2]


async def baton(url: str, *arguments: str, key: str = "key-a", state: str = "/nonexistent") -> tuple[int, str, str]:
    def run() -> subprocess.CompletedProcess[str]:
        env = {"BATON_URL": url, "BATON_API_KEY": key, "BATON_STATE": state, "PATH": "", "PYTHONUTF8": "1"}
        command = [sys.executable, "-m", "services.cli", *arguments]
        nothing = subprocess.DEVNULL
        return subprocess.run(command, cwd=ROOT, env=env, stdin=nothing, capture_output=True, text=True, timeout=60)

    done = await asyncio.to_thread(run)
    return done.returncode, done.stdout, done.stderr


async def test_chat_streams_the_answer_and_tells_errors_plainly() -> None:
    async with http_stack() as (_, url):
        assert await baton(url, "chat", "hi") == (0, default_output("") + "\n", "")
        code, _, error = await baton(url, "chat", "hi", "--max-tokens", "0")
        assert (code, error) == (1, "baton chat: HTTP 400: max_tokens: input should be greater than or equal to 1\n")
        code, _, error = await baton(url, "chat", "hi", key="wrong")
        assert code == 1
        assert "not valid" in error
    code, _, error = await baton(url, "chat", "hi")
    assert code == 1
    assert "./baton up" in error
    code, _, error = await baton("", "chat", "hi")
    assert "no stack is running; start one with ./baton up" in error
    code, _, error = await baton("localhost:8080", "chat", "hi")
    assert (code, "'localhost:8080' is not the address of a gateway" in error) == (1, True)
    assert (await baton(url, "chat"))[0] == 2, "no question"


async def test_trace_lists_requests_and_prints_one() -> None:
    async with http_stack() as (stack, url):
        await baton(url, "chat", "hi")
        await stack.settled()
        await asyncio.sleep(0.4)
        code, table, error = await baton(url, "trace", key="key-admin")
        assert code == 0, error
        request = table.splitlines()[1].split()[0]
        code, text, error = await baton(url, "trace", request, key="key-admin")
        assert code == 0, error
        assert "gateway.stream" in text
        # a tenant's key shows its own requests like the admin's, and no other's
        code, table, error = await baton(url, "trace", key="key-a")
        assert (code, error) == (0, "")
        assert [line.split()[0] for line in table.splitlines()[1:]] == [request]
        code, text, _ = await baton(url, "trace", request, key="key-a")
        assert code == 0
        assert "gateway.stream" in text
        code, table, error = await baton(url, "trace", key="key-b")
        assert (code, error) == (0, "")
        assert request not in table
        code, text, error = await baton(url, "trace", request, key="key-b")
        assert (code, text) == (1, "")
        assert f"no trace '{request}'" in error
        # programs get JSON, and what is no id reaches no other door
        code, listed, error = await baton(url, "trace", "--json", key="key-a")
        assert (code, [one["request_id"][4:16] for one in json.loads(listed)]) == (0, [request]), error
        code, whole, _ = await baton(url, "trace", request, "--json", key="key-admin")
        assert json.loads(whole)["summary"]["request_id"][4:16] == request
        for wrong in ("nope", "../cluster"):
            code, _, error = await baton(url, "trace", wrong, key="key-admin")
            assert (code, error.startswith(f"baton trace: no trace {wrong!r}")) == (1, True), error


def test_a_chat_is_cooler_than_the_api_unless_told() -> None:
    def body(*argv: str) -> dict[str, Any]:
        return request_body("m", "hi", _parser().parse_args(["hi", *argv]))

    assert body() == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0.2}
    assert body("--temperature", "0", "--seed", "7")["temperature"] == 0
    assert body("--seed", "7")["seed"] == 7
