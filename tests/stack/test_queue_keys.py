"""The queue as a user meets it: `./baton keys nats`, and what it prints run as it stands, on fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from tests.stack.running import Baton, until

LINE = "hello from the queue"


def example(printed: str, custom_id: str) -> str:
    """The nats-py program in what the command prints, with another custom_id than the printed one."""
    program = textwrap.dedent(printed.partition("With nats-py:\n")[2])
    assert '"custom_id": "first"' in program
    return program.replace('"custom_id": "first"', f'"custom_id": "{custom_id}"')


def run_program(program: str, folder: Path) -> str:
    path = folder / "example.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def connected(user: dict[str, Any]) -> nats.NATS:
    return await nats.connect(
        user["url"],
        user=user["user"],
        password=user["password"],
        inbox_prefix=user["inbox_prefix"],
        allow_reconnect=False,
        max_reconnect_attempts=0,
    )


@pytest.mark.model
def test_a_credential_printed_is_a_credential_that_works(own: Baton, tmp_path: Path, default_model_dir: Path) -> None:
    # Given: a credential made while nothing runs, and a stack
    early = own.run("keys", "nats", "early")
    assert early.returncode == 0, early.stderr
    assert "next ./baton up" in early.stdout
    own.up("--fake")
    # When: a tenant policy does not know asks
    printed = own.run("keys", "nats", "acme")
    assert printed.returncode == 0, printed.stderr
    assert "./baton keys create acme" in printed.stderr
    # Then: its line comes back as an error
    told = run_program(example(printed.stdout, "one"), tmp_path)
    assert '"stream": "batch-submit-acme"' in told or '"stream":"batch-submit-acme"' in told
    assert "one" in told
    assert "acme" in told.splitlines()[-1] or "tenant" in told.splitlines()[-1]

    # When: the tenant is made, the same program runs a line
    created = own.run("keys", "create", "acme", "--json")
    assert created.returncode == 0, created.stderr
    again = own.run("keys", "nats", "acme")
    assert again.stdout == printed.stdout
    assert not again.stderr
    ran = run_program(example(again.stdout, "two"), tmp_path)
    assert "two" in ran
    assert "'status_code': 200" in ran
    # The key made beside it opens the door of HTTP.
    key = json.loads(created.stdout)["api_key"]
    assert own.openai(key).models.list().data

    # The credential made before the start works as well, and is another tenant's.
    before = json.loads(own.run("keys", "nats", "early", "--json").stdout)
    assert before["url"] == json.loads(own.run("keys", "nats", "acme", "--json").stdout)["url"]
    assert before["subjects"]["submit"].endswith(".early")

    # When: it is revoked; then it opens nothing, and a new one has another password
    user = json.loads(own.run("keys", "nats", "acme", "--json").stdout)
    revoked = own.run("keys", "nats", "acme", "--revoke")
    assert revoked.returncode == 0, revoked.stderr
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        asyncio.run(connected(user))
    assert json.loads(own.run("keys", "nats", "acme", "--json").stdout)["password"] != user["password"]
    assert own.answers(), "none of this disturbed the stack"


@pytest.mark.long
@pytest.mark.model
async def test_lines_outlive_a_killed_batch_service(own: Baton, default_model_dir: Path) -> None:
    own.up("--fake")
    assert own.run("keys", "create", "acme").returncode == 0
    user = json.loads(own.run("keys", "nats", "acme", "--json").stdout)
    client = await connected(user)
    count = 40
    for number in range(count):
        if number in (10, 25):
            os.kill(own.pid("batch"), signal.SIGKILL)
        body = {"model": "smollm2-135m-instruct", "prompt": LINE, "max_tokens": 4}
        line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
        await client.request(user["subjects"]["submit"], json.dumps(line).encode(), timeout=10)
        if number == 24:
            until(lambda: [p for p, line in own.processes().items() if line.strip().endswith("services.batch")], 30)
    results: list[dict[str, Any]] = []
    after = ""
    for _ in range(900):
        try:
            question = json.dumps({"after": after, "limit": 10}).encode()
            page = json.loads((await client.request(user["subjects"]["results"], question, timeout=2)).data)
        except nats.errors.Error:
            page = {}
        results += page.get("data", [])
        after = page.get("after", after)
        if len(results) == count and page.get("pending") == 0:
            break
        await asyncio.sleep(0.1)
    await client.close()
    assert sorted(each["custom_id"] for each in results) == sorted(f"c{number}" for number in range(count))
    assert all(each["response"]["status_code"] == 200 for each in results)
