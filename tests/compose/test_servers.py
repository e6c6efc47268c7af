"""NATS and Redis in the images compose.yaml names, with the configuration its `setup` writes. Needs a Docker engine.

The rest of the suite runs against the servers of `./baton up`; here the images' own entry points, users and versions
are tried.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from docker import from_env
from docker.errors import DockerException, ImageNotFound
from testcontainers.core.container import DockerContainer

from services.cli.compose_setup import redis_config
from services.cli.credentials import Credentials, ensure_credentials
from services.policy.accounts import Accounts
from shared.bus.bus import Delivery
from shared.bus.nats_connection import connect_bus
from shared.bus.streams import AUDIT_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Forbidden, SettingsError, Unavailable
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import Epoch, RequestId, TenantId
from shared.store.redis_store import connect_redis
from shared.store.secrets import read_secret_text
from tests.compose.file import resolved
from tests.stack.running import until

pytestmark = pytest.mark.usefixtures("engine")

PASSWORD = "a-password-of-redis"


def served(name: str, port: int, config: Path, *more: str) -> Iterator[tuple[str, int]]:
    """A service of compose.yaml alone, started as it is there; yields its address.

    Without `setup` nobody gives it a folder: `more` arguments name the only one every user may write, /tmp.
    """
    spec: dict[str, Any] = resolved()["services"][name]
    # In the stack it belongs to the container's user.
    config.chmod(0o644)
    secrets = next(volume["target"] for volume in spec["volumes"] if volume.get("read_only"))
    container = (
        DockerContainer(spec["image"])
        .with_command([*spec["command"], *more])
        .with_exposed_ports(port)
        .with_volume_mapping(str(config), f"{secrets}/{config.name}")
        .with_kwargs(user=spec["user"])
    )
    have_image(spec["image"])
    try:
        container.start()
        address = container.get_container_host_ip(), int(container.get_exposed_port(port))
        until(lambda: answers(address), 30, lambda: container.get_logs())
        yield address
    finally:
        container.stop()


def have_image(image: str) -> None:
    """Skips when the image is neither here nor to be had."""
    client = from_env()
    try:
        client.images.get(image)
    except ImageNotFound:
        try:
            client.images.pull(image)
        except DockerException as exc:
            pytest.skip(f"no image {image}: {type(exc).__name__}")
    finally:
        client.close()


def answers(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return ensure_credentials(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def nats_url(credentials: Credentials) -> Iterator[str]:
    for host, port in served("nats", 4222, credentials.nats_config, "-sd", "/tmp/nats"):
        yield f"nats://{host}:{port}"


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tmp_path_factory.mktemp("redis") / "redis.conf"
    config.write_text(redis_config(PASSWORD))
    for host, port in served("redis", 6379, config, "--dir", "/tmp"):
        yield f"redis://{host}:{port}/0"


async def test_services_speak_and_store_through_nats(nats_url: str, credentials: Credentials) -> None:
    # Given: the scheduler and policy, each as its own user
    def password(service: str) -> str:
        return read_secret_text(credentials.nats_password(service))

    got: list[m.AuditRecord] = []

    async def keep(delivery: Delivery) -> None:
        got.append(delivery.message)

    async with (
        connect_bus(nats_url, "policy", password=password("policy")) as policy,
        connect_bus(nats_url, "scheduler", password=password("scheduler")) as scheduler,
    ):
        # When: a record is stored before anybody takes it
        await policy.consume(AUDIT_STREAM, subjects.audit("scheduler"), m.AuditRecord, keep, durable="policy")
        record = m.AuditRecord(service="scheduler", number=1, action="led")
        await scheduler.publish_durable(subjects.audit("scheduler"), record, message_id="1")
        # Then: it arrives, and a lease is given to one at a time
        async with asyncio.timeout(20):
            while not got:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert got == [record]
        assert await scheduler.acquire_lease("default", "first", 5.0)
        assert await scheduler.acquire_lease("default", "second", 5.0) is None
    # And: a user without its password is nobody
    with pytest.raises(Forbidden):
        async with connect_bus(nats_url, "policy", password="wrong"):
            pass


async def test_policy_keeps_its_books_in_redis(redis_url: str) -> None:
    tenant = TenantId("demo")
    # Given: a stranger is refused
    with pytest.raises((Unavailable, SettingsError)):
        async with connect_redis(redis_url, password="wrong") as stranger:
            await Accounts(stranger).usage(tenant)
    async with connect_redis(redis_url, password=PASSWORD) as redis:
        # When: policy's scripts book a request twice
        accounts = Accounts(redis, "test")
        settle = m.Settle(
            attempt=Attempt(RequestId("req-1"), Epoch(1)),
            grant=SignedGrant(b"", b""),
            prompt_tokens=5,
            completion_tokens=7,
        )
        for _ in range(2):
            await accounts.settle(tenant, Limits(), "r-1", settle)
        # Then: it stands there once, and is written to the append-only file
        usage = await accounts.usage(tenant)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == ("5", "7")
        assert (await redis.execute("INFO", "persistence"))["aof_enabled"] == 1
