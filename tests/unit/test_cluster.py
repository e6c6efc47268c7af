"""What the gateway tells an operator of workers and scheduler, and how `./baton status` prints it."""

from __future__ import annotations

from services.cli.status import lines
from services.gateway.cluster import FORGET_S, Cluster
from shared.contracts.ids import Incarnation, IngressId, RequestId, TenantId, Term, WorkerId
from shared.contracts.messages import GatewayBeat, SchedulerBeat, WorkerBeat
from shared.contracts.parts import TenantLoad


def worker_beat(
    worker: str, role: str = "decode", number: int = 1, free: int = 8, fake: bool = False, pool: str = "default"
) -> WorkerBeat:
    return WorkerBeat(
        worker=WorkerId(worker),
        role=role,
        pool=pool,
        incarnation=Incarnation(1),
        boot_id="b",
        host="h",
        number=number,
        free_blocks=(free,),
        total_blocks=(8,),
        running=8 - free,
        fake=fake,
    )


def scheduler_beat(term: int, queued: int = 0) -> SchedulerBeat:
    return SchedulerBeat(pool="default", term=Term(term), scheduler_id=f"s{term}", queued=queued)


def test_the_newest_beats_are_shown_by_role_with_their_age() -> None:
    # Given two workers and a scheduler that were heard
    cluster = Cluster()
    cluster.on_worker_beat(worker_beat("p-1", "prefill"), 1.0)
    cluster.on_worker_beat(worker_beat("d-1", free=8), 1.0)
    cluster.on_worker_beat(worker_beat("d-1", free=5), 2.0)
    cluster.on_scheduler_beat(scheduler_beat(2, queued=3), 2.0)
    # When a deposed leader is heard late
    cluster.on_scheduler_beat(scheduler_beat(1, queued=9), 2.4)
    # Then the newest word of each counts
    body = cluster.body(2.5)
    assert [(w["id"], w["free_blocks"], w["age_s"]) for w in body["workers"]] == [("d-1", [5], 0.5), ("p-1", [8], 1.5)]
    assert (body["scheduler"]["id"], body["scheduler"]["queued"]) == ("s2", 3)


def test_who_falls_silent_is_dropped() -> None:
    cluster = Cluster()
    nothing = {"scheduler": None, "pools": [], "ingresses": [], "workers": []}
    assert cluster.body(0.0) == nothing
    cluster.on_worker_beat(worker_beat("d-1"), 0.0)
    cluster.on_scheduler_beat(scheduler_beat(1), 0.0)
    cluster.on_ingress_beat(GatewayBeat(ingress_id=IngressId("gateway-1"), number=1), 0.0)
    assert all(cluster.body(FORGET_S).values())
    assert cluster.body(FORGET_S + 0.1) == nothing


def test_gateways_and_the_batch_service_are_told_apart() -> None:
    cluster = Cluster()
    held = (RequestId("req-1"), RequestId("req-2"))
    cluster.on_ingress_beat(GatewayBeat(ingress_id=IngressId("gateway-7f"), number=1), 1.0)
    cluster.on_ingress_beat(GatewayBeat(ingress_id=IngressId("batch-0a"), number=4, requests=held), 2.0)
    assert cluster.body(2.5)["ingresses"] == [
        {"id": "batch-0a", "kind": "batch", "requests": 2, "age_s": 0.5},
        {"id": "gateway-7f", "kind": "gateway", "requests": 0, "age_s": 1.5},
    ]


def test_the_queue_is_shown_by_class() -> None:
    cluster = Cluster()
    beat = SchedulerBeat(pool="default", term=Term(1), scheduler_id="s1", queued=3, queued_by_class={"batch": 3})
    cluster.on_scheduler_beat(beat, 1.0)
    assert cluster.body(1.0)["scheduler"]["queued_by_class"] == {"batch": 3}


def test_tenants_that_wait_are_shown_most_waiting_first_over_all_pools() -> None:
    cluster = Cluster()
    for pool, waiting in (("a", 2), ("b", 5)):
        load = TenantLoad(TenantId(f"of-{pool}"), "batch", 2.0, waiting, 1)
        beat = SchedulerBeat(pool=pool, term=Term(1), scheduler_id=pool, queued=waiting, tenants=(load,))
        cluster.on_scheduler_beat(beat, 1.0)
    body = cluster.body(1.0)
    first = {"tenant": "of-b", "class": "batch", "weight": 2.0, "waiting": 5, "running": 1}
    assert body["scheduler"]["tenants"][0] == first
    assert [tenant["waiting"] for tenant in body["scheduler"]["tenants"]] == [5, 2]
    shown = {"url": "http://h:1", "pid": 7, "gateway": {"requests": 0}, **body}
    assert "waiting    of-b                 5 batch  weight 2  1 running" in lines(shown)


def test_status_prints_a_line_a_worker_and_labels_fakes() -> None:
    cluster = Cluster()
    cluster.on_worker_beat(worker_beat("d-1", free=5, fake=True), 0.0)
    gateway = {"id": "gateway-1", "requests": 2, "draining": False}
    shown = {"url": "http://h:1", "pid": 7, "gateway": gateway, **cluster.body(0.5)}
    stack, scheduler, _, worker = lines(shown)
    assert stack == "http://h:1  process 7  2 requests"
    assert scheduler == "scheduler  not heard"
    assert worker.split() == ["d-1", "3", "0", "0", "5/8", "0.5s", "fake"]
    assert lines({"url": "http://h:1", "pid": 7}) == ["http://h:1  process 7"]


def test_each_pool_is_shown_with_its_scheduler_and_all_of_them_together() -> None:
    cluster = Cluster()
    for pool, term, queued, at in (("a", 3, 1, 0.0), ("b", 2, 4, 1.0)):
        classes = {"interactive": queued}
        cluster.on_scheduler_beat(
            SchedulerBeat(
                pool=pool, term=Term(term), scheduler_id=f"s-{pool}", queued=queued, running=2, queued_by_class=classes
            ),
            at,
        )
    cluster.on_worker_beat(worker_beat("d-1", pool="b"), 1.0)
    cluster.on_worker_beat(worker_beat("d-2", pool="c"), 1.0)
    body = cluster.body(1.5)
    assert [(p["pool"], p["scheduler"] and p["scheduler"]["queued"]) for p in body["pools"]] == [
        ("a", 1),
        ("b", 4),
        ("c", None),
    ]
    together = body["scheduler"]
    assert (together["queued"], together["running"], together["term"], together["age_s"]) == (5, 4, 3, 1.5)
    assert together["queued_by_class"] == {"interactive": 5}
    for pool in body["pools"]:
        pool["models"] = [f"model-{pool['pool']}"]
    shown = lines({"url": "u", "pid": 1, "gateway": {"requests": 0}, **body})
    assert shown[1:4] == [
        "pool a (model-a)  scheduler  1 queued  2 running  term 3",
        "pool b (model-b)  scheduler  4 queued  2 running  term 2",
        "pool c (model-c)  scheduler  not heard",
    ]
    assert shown[4].endswith("  POOL")
    assert shown[5].endswith("  b")


def test_one_fake_worker_is_enough_to_distrust_tokens() -> None:
    cluster = Cluster()
    cluster.on_worker_beat(worker_beat("d-1"), 1.0)
    assert not cluster.has_fake_workers("default")
    cluster.on_worker_beat(worker_beat("d-2", fake=True), 1.0)
    assert cluster.has_fake_workers("default")
    assert not cluster.has_fake_workers("other")
    cluster.forget_old(1.0 + FORGET_S + 1.0)
    assert not cluster.has_fake_workers("default")
