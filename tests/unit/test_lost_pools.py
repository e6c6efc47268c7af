"""The news that a dead worker's pool is gone reaches policy whatever happens to whoever found it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.state import StateFolder
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import PURGE_ACK_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import SettingsError, Unavailable
from shared.contracts.ids import WorkerId
from shared.engine.worker_purges import lost_pools_told, own_pool_told
from shared.kv.pool_file import wiped
from tests.pipeline.keyed_support import until

DEAD = WorkerId("decode-dead")


def orphan(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{DEAD}.kvpool"
    path.write_bytes(b"secret" * 100)
    return path


async def heard_on(broker: MemoryBroker) -> list[WorkerId]:
    heard: list[WorkerId] = []

    async def on_ack(delivery: Delivery) -> None:
        heard.extend(delivery.message.wiped)

    bus = MemoryBus(broker, "policy")
    await bus.consume(PURGE_ACK_STREAM, subjects.ANY_PURGE_ACK, m.PurgeAck, on_ack, durable="test")
    return heard


async def test_policy_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    broker = MemoryBroker()
    heard, bus = await heard_on(broker), MemoryBus(broker, "decode")
    orphan(tmp_path)

    async def load_in_vain() -> None:
        async with lost_pools_told(bus, "decode", WorkerId("decode-new"), tmp_path):
            await until(lambda: heard == [DEAD] and not wiped(tmp_path))
            raise SettingsError("the model cannot be loaded")

    with pytest.raises(SettingsError):
        await load_in_vain()


async def test_what_could_not_be_told_is_left_to_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    heard, bus = await heard_on(broker), MemoryBus(broker, "decode")
    orphan(tmp_path)

    async def away(*args: object, **fields: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(bus, "publish_durable", away)
        async with lost_pools_told(bus, "decode", WorkerId("decode-1"), tmp_path):
            pass
        # its own pool's end too
        async with own_pool_told(bus, "decode", WorkerId("decode-1"), tmp_path / "decode-1.kvpool"):
            pass
    assert wiped(tmp_path) == ("decode-1", DEAD)
    async with lost_pools_told(bus, "decode", WorkerId("decode-2"), tmp_path):
        await until(lambda: set(heard) == {DEAD, "decode-1"})
        await until(lambda: wiped(tmp_path) == ())


async def test_a_pool_that_is_still_there_is_not_told(tmp_path: Path) -> None:
    broker = MemoryBroker()
    heard, bus = await heard_on(broker), MemoryBus(broker, "decode")
    path = orphan(tmp_path)
    async with own_pool_told(bus, "decode", DEAD, path):
        pass
    assert (heard, wiped(tmp_path)) == ([], ())


def test_a_killed_stack_leaves_marks_of_its_pools_to_the_next_start(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    pools = state.pool_folder()
    orphan(pools)
    state.clear_run()
    assert not pools.exists()
    state.clear_run()
    other = tmp_path / "kv"
    other.mkdir()
    state.hand_marks(other)
    assert wiped(other) == (DEAD,)
    assert wiped(state.marks) == ()
