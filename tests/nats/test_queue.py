"""The queue as a tenant meets it: a plain NATS client with a credential, a real nats-server and a real Redis, and a
service behind it that may be killed at any time."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.cli.credentials import Credentials, add_queue_tenant, ensure_credentials
from services.cli.queue_user import QueueUser, describe
from shared.contracts.ids import TenantId
from shared.settings.load import ROOT
from tests.servers import NatsServer, RedisServer, start_nats

ACME, OTHER = TenantId("acme"), TenantId("other")


def line(custom_id: str, prompt: str = "hi", **changes: Any) -> bytes:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | changes
    ).encode()


class Door:
    """The service's process, on servers of the test's own."""

    def __init__(self, server: NatsServer, redis: RedisServer, credentials: Credentials) -> None:
        self.server = server
        self.credentials = credentials
        self.users = {
            tenant: describe(tenant, add_queue_tenant(credentials, tenant), server.url) for tenant in (ACME, OTHER)
        }
        password = credentials.nats_password("batch")
        prefix = f"test-{secrets.token_hex(4)}"
        arguments = [server.url, str(password), redis.url, prefix, str(credentials.queue_tenants)]
        self.command = [sys.executable, "-m", "tests.nats.queue_child", *arguments]
        self.process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    @asynccontextmanager
    async def client(self, tenant: TenantId = ACME) -> AsyncIterator[Tenant]:
        user = self.users[tenant]
        connection = await nats.connect(
            user.url, user=user.user, password=user.password, inbox_prefix=user.inbox_prefix
        )
        try:
            yield Tenant(connection, user)
        finally:
            await connection.close()


class Tenant:
    """What a tenant does with nothing but its credential."""

    def __init__(self, connection: Client, user: QueueUser) -> None:
        self.connection = connection
        self.subjects = user.subjects

    async def submit(self, payload: bytes, message_id: str = "") -> dict[str, Any]:
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        stored = await self.connection.request(self.subjects["submit"], payload, timeout=10, headers=headers)
        found: dict[str, Any] = json.loads(stored.data)
        return found

    async def page(self, after: str = "", limit: int = 100) -> dict[str, Any]:
        question = json.dumps({"after": after, "limit": limit}).encode()
        found: dict[str, Any] = json.loads(
            (await self.connection.request(self.subjects["results"], question, timeout=10)).data
        )
        return found

    async def everything(self, count: int, limit: int = 100, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """All results, page by page, once there are `count` and nothing is pending."""
        found: list[dict[str, Any]] = []
        after = ""
        async with asyncio.timeout(timeout_s):
            while True:
                page = await self.page(after, limit)
                assert len(page["data"]) <= limit
                found += page["data"]
                after = page["after"]
                if not page["has_more"] and not page["pending"] and len(found) >= count:
                    return found
                if not page["data"]:
                    await asyncio.sleep(0.05)


@pytest.fixture
def door(tmp_path: Path, redis_server: RedisServer) -> Iterator[Door]:
    credentials = ensure_credentials(tmp_path)
    for tenant in (ACME, OTHER):
        add_queue_tenant(credentials, tenant)
    server = start_nats(tmp_path / "nats", credentials.nats_config.read_text())
    found = Door(server, redis_server, credentials)
    found.open()
    yield found
    found.kill()
    server.kill()


def by_id(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in lines:
        found.setdefault(each["custom_id"], []).append(each)
    return found


async def test_twenty_lines_good_and_bad_come_back_by_page_and_as_they_are_done(door: Door) -> None:
    async with door.client() as acme, door.client(OTHER) as other:
        heard: list[dict[str, Any]] = []

        async def on_done(msg: Msg) -> None:
            heard.append(json.loads(msg.data))

        await acme.connection.subscribe(acme.subjects["done"], cb=on_done)
        await acme.connection.flush()
        lines = [line(f"c{number}", f"prompt {number}") for number in range(15)]
        lines += [line("c3", "again"), b"{", b"", line("m", method="GET"), line("u", url="/v1/x")]
        for payload in lines:
            assert (await acme.submit(payload))["stream"] == "batch-submit-acme"

        results = await acme.everything(20, limit=7)
        assert len(results) == 20
        found = by_id(results)
        for number in range(15):
            good = [each for each in found[f"c{number}"] if each["error"] is None]
            assert [each["response"]["body"]["text"] for each in good] == [f"PROMPT {number}"]
        assert [each["error"]["code"] for each in found["c3"] if each["error"]] == ["duplicate_custom_id"]
        assert [each["error"]["code"] for each in found[None]] == ["invalid_json_line"] * 2  # type: ignore[index]
        assert found["m"][0]["error"]["code"] == "invalid_method"
        assert found["u"][0]["error"]["code"] == "invalid_url"
        async with asyncio.timeout(10):
            while len(heard) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sorted(each["id"] for each in heard) == sorted(each["id"] for each in results)
        assert len({each["id"] for each in results}) == 20

        # Results stay, and another tenant has none of them.
        assert await acme.everything(20) == results
        assert await other.page() == {"data": [], "after": "", "has_more": False, "pending": 0}


async def test_the_same_custom_ids_and_message_ids_of_two_tenants_do_not_meet(door: Door) -> None:
    async with door.client() as acme, door.client(OTHER) as other:
        for who, prompt in ((acme, "ours"), (other, "theirs")):
            assert "duplicate" not in await who.submit(line("same", prompt), message_id="same")
        # A message id sent twice is stored once, as NATS has it.
        assert (await acme.submit(line("same", "ours"), message_id="same"))["duplicate"] is True
        for who, text in ((acme, "OURS"), (other, "THEIRS")):
            (result,) = await who.everything(1)
            assert result["response"]["body"]["text"] == text


async def test_every_line_has_one_result_though_the_service_is_killed_again_and_again(door: Door) -> None:
    count, kills = 120, 4
    async with door.client() as acme:

        async def submit() -> None:
            for number in range(count):
                await acme.submit(line(f"c{number}", "slow") if number % 10 else b"bad %d" % number)

        submitting = asyncio.create_task(submit())
        for _ in range(kills):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(door.kill)
            # Lines are taken while nobody is there: the stream keeps them.
            await acme.submit(line(f"extra-{secrets.token_hex(4)}"))
            await asyncio.to_thread(door.open)
        await submitting
        results = await acme.everything(count + kills, timeout_s=90)
    assert len(results) == count + kills
    found = by_id(results)
    assert all(len(each) == 1 for custom_id, each in found.items() if custom_id is not None)
    assert len(found[None]) == count // 10  # type: ignore[index]
    texts = {each["response"]["body"]["text"] for each in results if each["response"]}
    assert texts == {"SLOW", "HI"}


REFUSED: dict[str, Callable[[QueueUser], tuple[str, bytes]]] = {
    "submit as another": lambda other: (other.subjects["submit"], line("forged")),
    "read another's results": lambda other: (other.subjects["results"], b"{}"),
    "make a consumer": lambda other: (f"$JS.API.CONSUMER.DURABLE.CREATE.batch-submit-{other.tenant}.x", b"{}"),
    "make a consumer of one's own": lambda _: ("$JS.API.CONSUMER.DURABLE.CREATE.batch-submit-acme.x", b"{}"),
    "make a stream": lambda _: ("$JS.API.STREAM.CREATE.mine", b'{"name":"mine","subjects":["baton.>"]}'),
    "read a stream": lambda other: (f"$JS.API.STREAM.MSG.GET.batch-submit-{other.tenant}", b'{"seq":1}'),
    "ask policy": lambda _: ("baton.v1.policy.admin", b"{}"),
    "ask the system": lambda _: ("$SYS.REQ.SERVER.PING", b""),
}


async def test_a_credential_opens_nothing_else(door: Door) -> None:
    """One case of each kind, as a tenant would meet it; `test_permissions` tries every subject."""
    errors: list[str] = []

    async def on_error(exc: Exception) -> None:
        errors.append(str(exc).lower())

    user = door.users[ACME]
    connection = await nats.connect(
        user.url, user=user.user, password=user.password, inbox_prefix=user.inbox_prefix, error_cb=on_error
    )
    for case, what in REFUSED.items():
        subject, payload = what(door.users[OTHER])
        with pytest.raises(nats.errors.TimeoutError):
            await connection.request(subject, payload, timeout=0.1)
        await connection.flush()
        assert [f'permissions violation for publish to "{subject.lower()}"' in error for error in errors] == [True], (
            case
        )
        errors.clear()
    await connection.close()
    async with door.client(OTHER) as other:
        assert await other.page() == {"data": [], "after": "", "has_more": False, "pending": 0}


async def test_a_foreign_payload_does_not_change_whose_line_it_is(door: Door) -> None:
    """A line says nothing about its tenant; one that tries is told that it has a field too many."""
    async with door.client() as acme, door.client(OTHER) as other:
        await acme.submit(line("a", tenant="other"))
        (told,) = await acme.everything(1)
        assert told["error"]["code"] == "unknown_parameter"
        assert (await other.page())["data"] == []


async def test_lines_that_wait_lie_encrypted_in_the_store_of_nats(door: Door) -> None:
    async with door.client() as acme:
        door.kill()
        await acme.submit(line("a", "words nobody else should read"))
        await acme.connection.flush()
        kept = [path for path in (door.server.folder / "store").rglob("*") if path.is_file()]
        assert any(path.stat().st_size for path in kept)
        assert not [path for path in kept if b"nobody else" in path.read_bytes()]
        door.open()
        (result,) = await acme.everything(1)
        assert result["response"]["body"]["text"] == "WORDS NOBODY ELSE SHOULD READ"
