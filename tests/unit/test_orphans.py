"""Responses in the background that nobody runs are offered to gateways: in time, and not too often."""

from __future__ import annotations

from typing import Any

from services.policy.ingress_watch import IngressWatch
from services.policy.orphans import AGAIN_S, MOST_AGAIN_S, Orphans
from services.policy.responses import BackgroundRun
from services.policy.tenants import KeyRecord
from shared.bus.bus import NO_RESPONDERS
from shared.contracts import response_messages as r
from shared.contracts.errors import BatonError, Overloaded, Unavailable, to_wire
from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.contracts.messages import Refusal

OWNER = IngressId("gateway-1")
TENANT, KEY = TenantId("acme"), bytes(32)


class _World:
    """Policy's store and bus, with a clock of its own."""

    def __init__(self, *runs: BackgroundRun) -> None:
        self.runs = list(runs)
        self.now = 100.0
        self.error: BatonError | None = None
        self.refused: BatonError | None = None
        self.offers: list[RequestId] = []
        self.watch = IngressWatch()
        self.owners = [KeyRecord("first", TENANT, KEY.hex())]
        self.asked: list[r.ResponseAdopt] = []
        self.orphans = Orphans(self, self, self, self.watch, lambda: self.now)  # type: ignore[arg-type]

    async def in_background(self) -> list[BackgroundRun]:
        return self.runs

    async def key(self, key_hash: bytes) -> KeyRecord | None:
        return next((key for key in self.owners if key.hash == key_hash.hex()), None)

    async def keys(self) -> list[KeyRecord]:
        return self.owners

    async def request(self, subject: str, ask: r.ResponseAdopt, reply: Any, timeout_s: float) -> Any:
        self.offers.append(ask.request_id)
        self.asked.append(ask)
        if self.error is not None:
            raise self.error
        return r.ResponseAdopted() if self.refused is None else Refusal(error=to_wire(self.refused))

    async def sweeps(self, seconds: int) -> int:
        """Offers within so many seconds."""
        before = len(self.offers)
        for _ in range(seconds):
            self.now += 1.0
            await self.orphans.sweep()
        return len(self.offers) - before


def run(number: int, owner: IngressId | None = None) -> BackgroundRun:
    return BackgroundRun(TENANT, RequestId(f"req-{number}"), KEY, owner)


async def test_what_a_living_gateway_runs_is_left_to_it_until_it_is_lost() -> None:
    world = _World(run(1, OWNER))
    world.watch.heard(OWNER, world.now)
    assert await world.sweeps(2) == 0
    world.watch.nobody_listens(OWNER, world.now)
    assert await world.sweeps(2) == 0
    assert await world.sweeps(2) == 1


async def test_an_owner_that_was_never_heard_has_its_lease() -> None:
    world = _World(run(1, OWNER))
    assert await world.sweeps(10) == 0
    assert await world.sweeps(2) == 1


async def test_what_was_refused_is_offered_again_later() -> None:
    world = _World(run(1))
    world.refused = Overloaded("full")
    assert await world.sweeps(int(AGAIN_S)) == 1
    assert await world.sweeps(int(AGAIN_S)) == 1
    assert await world.sweeps(int(7 * AGAIN_S)) == 2  # after twice as long, and twice that
    assert await world.sweeps(3600) == 8, "its 30 runs are to last for hours"
    world.refused = None
    await world.sweeps(int(MOST_AGAIN_S))
    assert await world.sweeps(int(2 * AGAIN_S)) == 2, "one that was taken begins anew"


async def test_where_there_is_no_gateway_it_is_offered_at_once_to_the_first() -> None:
    world = _World(run(1))
    world.error = Unavailable("nobody", code=NO_RESPONDERS)
    assert await world.sweeps(3) == 3


async def test_so_many_at_once() -> None:
    world = _World(*(run(number) for number in range(20)))
    assert await world.sweeps(1) == 8
    assert await world.sweeps(2) == 12
    assert len(set(world.offers)) == 20


async def test_many_that_nobody_can_take_leave_others_their_turn() -> None:
    world = _World(*(run(number) for number in range(100)))
    world.refused = Overloaded("full")
    await world.sweeps(13)
    assert len(set(world.offers)) == 100


async def test_one_whose_key_was_revoked_is_ended_under_another_of_its_tenants() -> None:
    world = _World(run(1))
    world.owners = [
        KeyRecord("first", TENANT, KEY.hex(), revoked=True),
        KeyRecord("other", TenantId("other"), bytes([1] * 32).hex()),
        KeyRecord("old", TENANT, bytes([2] * 32).hex(), revoked=True),
    ]
    assert await world.sweeps(int(AGAIN_S)) == 0  # nobody could look at it
    world.owners.append(KeyRecord("second", TENANT, bytes([3] * 32).hex()))
    assert await world.sweeps(int(2 * AGAIN_S)) >= 1
    assert {(ask.key_hash, ask.revoked) for ask in world.asked} == {(bytes([3] * 32), True)}
