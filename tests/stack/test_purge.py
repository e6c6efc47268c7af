"""People leave: a purge, a revoked key and a removed tenant on a whole stack, and what is left of them on disk."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.stack.running import MODEL, Baton, until

pytestmark = pytest.mark.model

TENANT = "leaver"


def new_key(stack: Baton) -> str:
    made = stack.run("keys", "create", TENANT, "--json")
    assert made.returncode == 0, made.stderr
    key: str = json.loads(made.stdout)["api_key"]
    return key


def holds(stack: Baton, folder: str, text: str) -> list[Path]:
    """Files of a part of the state folder in which a text stands."""
    found = []
    for path in (stack.folder / folder).rglob("*"):
        try:
            found += [path] if path.is_file() and text.encode() in path.read_bytes() else []
        except FileNotFoundError:  # an append-only file that was rewritten meanwhile
            continue
    return found


class Running:
    """Streams of a tenant, two at any time: one that comes to its end, as on a slow machine, is followed by another."""

    def __init__(self, client: openai.OpenAI, prompt: str) -> None:
        self._client, self._prompt = client, prompt
        self._over = threading.Event()
        self.codes: list[str | None] = []
        """Of the errors that ended streams."""
        self.started = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]

    def __enter__(self) -> Running:
        for number, thread in enumerate(self._threads, 1):
            thread.start()
            until(lambda number=number: self.started >= number)  # type: ignore[misc]
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                with self._client.completions.create(
                    model=MODEL, prompt=self._prompt, max_tokens=7000, stream=True
                ) as stream:
                    self._read(stream)
        except openai.APIError as error:
            self.codes.append(error.code)

    def _read(self, stream: openai.Stream[Any]) -> None:
        for number, _ in enumerate(stream):
            self.started += number == 0
            if self._over.is_set():
                return


def test_a_purge_leaves_nothing_of_a_tenant_and_a_receipt_says_so(fake_stack: Baton, tmp_path: Path) -> None:
    # Given a tenant with a stored response, a keyed answer, a file, and an answer under way
    marker, key = f"marker-{secrets.token_hex(8)}", new_key(fake_stack)
    client = fake_stack.openai(key)
    stored = client.responses.create(model=MODEL, input=f"{marker} is stored", store=True, max_output_tokens=8)
    client.completions.create(
        model=MODEL, prompt=f"{marker} has a key", max_tokens=4, extra_headers={"Idempotency-Key": marker}
    )
    body = {"model": MODEL, "prompt": f"{marker} is a line", "max_tokens": 2}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    kept = (f"response-parts:{stored.id.removeprefix('resp_')[:20]}", f"file:{file.id}")
    until(lambda: all(holds(fake_stack, "redis", name) for name in kept))
    # When it is purged
    with Running(client, f"{marker} runs") as running:
        done = fake_stack.run("purge", "--tenant", TENANT, "--reason", "left", "--wait", "60", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        # Then what ran ends with the error, which is no clean end
        until(lambda: running.codes)
    assert set(running.codes) == {"purged"}
    receipt = json.loads(done.stdout)["receipt"]
    # And every owner says what it took
    taken = {owner["owner"].rsplit("-", 1)[0]: owner.get("counts", {}) for owner in receipt["owners"]}
    assert (receipt["complete"], receipt["pending"], receipt["reason"]) == (True, [], "left")
    assert {"decode", "prefill", "gateway", "scheduler", "policy", "batch", "prefix-cache", "redis"} <= set(taken)
    assert taken["policy"] == {"keyed_answers": 1, "responses": 1}
    assert taken["decode"]["requests"] >= 1
    # And nothing of it is found any more, by its own key or on disk
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stored.id)
    assert client.files.list().data == []
    until(lambda: not any(holds(fake_stack, "redis", name) for name in kept))
    assert [path for path in fake_stack.files() if marker.encode() in path.read_bytes()] == []
    # And the receipt is policy's, which a changed one is not
    path = tmp_path / "receipt.json"
    path.write_text(done.stdout)
    assert fake_stack.run("purge", "--verify", str(path)).returncode == 0
    path.write_text(done.stdout.replace("left", "stayed"))
    assert fake_stack.run("purge", "--verify", str(path)).returncode == 1
    # And new work of the tenant runs as any other
    assert client.completions.create(model=MODEL, prompt=f"{marker} is back", max_tokens=2).choices


def test_a_revoked_key_opens_nothing_at_once_and_a_removed_tenant_is_gone(fake_stack: Baton) -> None:
    # Given two keys of a tenant, and an answer under way
    keys = [new_key(fake_stack) for _ in range(2)]
    clients = [fake_stack.openai(key) for key in keys]
    stream = clients[0].completions.create(model=MODEL, prompt="runs", max_tokens=800, stream=True)
    next(iter(stream))
    # When one of them is revoked
    name = f"key-{hashlib.sha256(keys[0].encode()).hexdigest()[:8]}"
    assert fake_stack.run("keys", "revoke", TENANT, name).returncode == 0
    # Then it opens nothing any more, and what it had begun goes on to its end
    until(lambda: status(fake_stack, keys[0]) == 401)
    assert status(fake_stack, keys[1]) == 200
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    # And when the tenant is removed, what runs of it ends too, and no key opens anything
    with Running(clients[1], "runs") as running:
        assert fake_stack.run("purge", "--tenant", TENANT, "--remove", "--wait", "60").returncode == 0
        until(lambda: running.codes)
    assert "purged" in running.codes
    until(lambda: status(fake_stack, keys[1]) == 401)


def status(stack: Baton, key: str) -> int:
    return httpx.get(f"{stack.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=10).status_code
