"""The protocol under faults: the real cores of ingress, scheduler, leases and hand-off in one simulated world.

`BATON_SIM_SEED=7 python -m pytest tests/simulation/test_protocol.py` replays one seed.
"""

from __future__ import annotations

import os
import typing
from collections import Counter
from dataclasses import replace

import pytest

from services.scheduler.effects import Effect
from services.scheduler.record import State
from shared.contracts.ids import WorkerId
from tests.simulation.mutations import MUTATIONS
from tests.simulation.network import NO_FAULTS, Violation
from tests.simulation.toy_model import Job, truth_of
from tests.simulation.world import World, simulate

CI_EVENTS = 100_000
MUTATION_SEEDS = (90, *range(36))
"""The first is one in which a lost event of the scheduler is all that could have ended a request."""
MUST_HAPPEN = (
    *(f"message {fault}" for fault in ("dropped", "duplicated", "late", "cut off")),
    "tokens gathered",
    *("revoked", "revoked began by itself", "revoked placed elsewhere", "withdrawn", "withdrawn unknown"),
    *(f"{node} {fault}" for node in ("decode", "prefill", "scheduler") for fault in ("killed", "paused")),
    *("gateway paused", "gateway killed", "decode cut off", "index killed", "match wrong", "pull corrupted"),
    *("quiet worker asked", "worker found gone", "event WorkerLost gone", "event Placed adopted"),
    *(f"request {state.value}" for state in State),
    *(f"effect {kind.__name__}" for kind in typing.get_args(Effect)),
)
"""Every kind of fault, state of a request and effect; one that never occurs is not tested."""


def seeds(count: int) -> list[int]:
    """The seeds to run: one when the environment names it."""
    asked = os.environ.get("BATON_SIM_SEED")
    return [int(asked)] if asked else list(range(count))


def message_of(seed: int) -> str:
    """How the seed fails; empty when it does not."""
    try:
        simulate(seed)
    except Violation as exc:
        return str(exc)
    return ""


def outcome(world: World) -> tuple[object, ...]:
    charged = sorted(world.ledger.charged.items())
    return world.net.events, world.net.now, world.finishes, world.handoffs, charged


def test_a_hundred_thousand_events_under_seeded_faults() -> None:
    events = resumed = bad_digests = 0
    finishes: Counter[str] = Counter()
    handoffs: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    terms = set()
    for seed in seeds(1000):
        world = simulate(seed)
        events += world.net.events
        resumed += world.resumed
        bad_digests += world.bad_digests
        finishes += world.finishes
        handoffs += world.handoffs
        counts += world.net.counts
        terms.add(world.lease.term)
        if events >= CI_EVENTS:
            break
    print(f"{events} events: {dict(finishes)}, {resumed} resumed, hand-offs {dict(handoffs)}, {dict(counts)}")
    if "BATON_SIM_SEED" not in os.environ:
        # a run in which nothing happens proves nothing
        assert events >= CI_EVENTS
        assert finishes["length"] + finishes["stop"] > 0.8 * finishes.total()
        assert resumed >= 10
        assert handoffs["done"] >= 100
        assert min(bad_digests, handoffs["digest_mismatch"]) >= 10
        assert max(terms) >= 3
        assert not [name for name in MUST_HAPPEN if not counts[name]]


def test_without_faults_everything_is_served_and_no_handoff_fails() -> None:
    world = World(0, NO_FAULTS).run()
    assert {*world.handoffs} == {"done"}
    assert world.resumed == 0
    assert world.finishes["error"] == sum(len(c.job.prompt) > 1_000 for c in world.clients if c.ends[0].error)


def test_a_seed_replays_exactly() -> None:
    assert outcome(simulate(3)) == outcome(simulate(3))
    assert outcome(simulate(3)) != outcome(simulate(9))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_core_broken_on_purpose_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutation takes one rule away; some seed must fail by it, name itself, and fail again when replayed."""
    MUTATIONS[name](monkeypatch)
    try:
        World(0, NO_FAULTS).run()
    except Violation:
        return
    messages = ((seed, message_of(seed)) for seed in MUTATION_SEEDS)
    seed, message = next((found for found in messages if found[1]), (None, ""))
    assert seed is not None, f"{name} went unnoticed in {len(MUTATION_SEEDS)} seeds"
    assert f"BATON_SIM_SEED={seed}" in message
    assert message_of(seed) == message


def test_a_prefill_worker_stopped_across_its_lease_and_continued_harms_nobody() -> None:
    """SIGSTOP in the middle of a hand-off, SIGCONT after the lease: the late commits are refused everywhere."""
    calm = replace(NO_FAULTS, until_s=60.0)
    world = World(1, calm, requests=60, prefills=1, decodes=1, prefill_tokens=2048)
    prompt = tuple(range(1, 900))
    job = Job("long", prompt, (truth_of(prompt, 24),), "interactive", 0.0, 120.0)
    world.arrive(job, at_s=20.0)
    prefill = world.prefills[WorkerId("prefill-0")]
    decode = world.decodes[WorkerId("decode-0")]
    net = world.net
    given_up: list[int] = []

    def frozen() -> bool:
        work = next((w for w in prefill.work.values() if len(w.tokens) == len(prompt) - 1), None)
        return work is not None and 0 < work.computed < len(work.tokens)

    def watch() -> None:
        if frozen():
            net.pause(prefill, 16.0)  # the lease is 10 s
            net.at(net.now + 15.9, lambda: given_up.append(world.handoffs["prefill_lease"]))
        else:
            net.at(net.now + 0.005, watch)

    net.at(20.0, watch)
    world.run()
    client = next(c for c in world.clients if c.job is job)
    assert given_up == [world.handoffs["prefill_lease"]]
    assert given_up[0] >= 1  # the decode worker gave up at the lease, and computed the prompt itself
    assert tuple(client.delivered[0]) == job.truths[0]
    assert client.stream.attempt.epoch == 1  # the client's stream never noticed
    assert world.late_commits >= 1
    assert world.bad_digests == 0  # nothing of the late commits was even read
    assert prefill.pool.idle
    assert decode.pool.idle
    assert {c.ends[0].finish for c in world.clients} <= {"length", "stop", "cancelled", "error"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_seeds() -> None:
    for seed in seeds(400):
        simulate(seed)
