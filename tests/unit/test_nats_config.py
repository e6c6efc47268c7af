"""The generated NATS configuration, as text. `tests/nats` tries it on a real server."""

from __future__ import annotations

import json

import pytest

from services.cli.nats_config import nats_config, permissions
from shared.contracts.subjects import HOPS, SERVICES


def test_the_scheduler_speaks_and_listens_by_the_table() -> None:
    allowed = permissions("scheduler")
    assert "baton.v1.decode.*.reserve" in allowed.publish
    assert "baton.v1.sched.*.submit" in allowed.subscribe
    assert "baton.v1.policy.admit" not in allowed.publish
    assert "baton.v1.trace.scheduler" in allowed.publish
    assert "$KV.baton-leases.>" in allowed.publish
    assert allowed.answers


@pytest.mark.parametrize("service", SERVICES)
def test_nobody_gets_a_blanket(service: str) -> None:
    allowed = permissions(service)
    everything = (*allowed.publish, *allowed.subscribe)
    assert f"_INBOX_{service}.>" in allowed.subscribe
    assert not {">", "$JS.API.>", "$SYS.>", "_INBOX.>", "baton.v1.>"} & set(everything)
    assert not [s for s in everything if s.startswith("$SYS")]
    assert not [s for s in everything if s.startswith("_INBOX_") and s != f"_INBOX_{service}.>"]
    streams = [s for s in everything if s.startswith(("$JS", "$KV"))]
    consumes = any(service in hop.receivers and hop.kind == "stream" for hop in HOPS)
    assert bool(streams) == (consumes or service == "scheduler")


def test_the_file_is_json_with_one_user_a_service() -> None:
    passwords = {service: f'p"{service}' for service in SERVICES}
    config = json.loads(nats_config(passwords))
    assert [user["user"] for user in config["authorization"]["users"]] == list(SERVICES)
    assert config["max_payload"] == 8 * 1024 * 1024
