"""The generated NATS configuration, as text. `tests/nats` tries it on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.credentials import add_queue_tenant, ensure_credentials, queue_tenants, remove_queue_tenant
from services.cli.nats_config import (
    ACCOUNT,
    USERS,
    check_tenant,
    nats_config,
    permissions,
    tenant_permissions,
)
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import TenantId, is_id
from shared.contracts.subjects import HOPS, SERVICES, TENANT

ACME, OTHER = TenantId("acme"), TenantId("other")
PASSWORDS = {user: f'p"{user}' for user in USERS}
BAD_IDS = ("*", ">", "a.b", "a*", "a>", "", "Acme", "a b", "a" * 41, "ä", "acme\n", "$SYS", "BATON", "../x")


def test_the_scheduler_speaks_and_listens_by_the_table() -> None:
    allowed = permissions("scheduler")
    assert "baton.v1.decode.*.reserve" in allowed.publish
    assert "baton.v1.sched.*.submit" in allowed.subscribe
    assert "baton.v1.policy.admit" not in allowed.publish
    assert "baton.v1.trace.scheduler" in allowed.publish
    assert "$KV.baton-leases.>" in allowed.publish
    assert allowed.answers


@pytest.mark.parametrize("user", USERS)
def test_nobody_gets_a_blanket(user: str) -> None:
    allowed = permissions(user, [ACME])
    everything = (*allowed.publish, *allowed.subscribe)
    assert f"_INBOX_{user}.>" in allowed.subscribe
    assert not {">", "$JS.API.>", "$SYS.>", "_INBOX.>", "baton.v1.>"} & set(everything)
    assert not [s for s in everything if s.startswith("$SYS")]
    assert not [s for s in everything if s.startswith("_INBOX_") and s != f"_INBOX_{user}.>"]
    streams = [s for s in everything if s.startswith(("$JS", "$KV"))]
    consumes = any(user in hop.receivers and hop.kind == "stream" for hop in HOPS)
    assert bool(streams) == (consumes or user == "scheduler")
    # the wildcard of a consumer's name stands only behind a stream nobody else speaks to or hears
    assert all(".batch-item." in s for s in streams if ".*" in s)


def test_a_tenant_may_do_four_things() -> None:
    allowed = tenant_permissions(ACME)
    assert set(allowed.publish) == {"baton.v1.batch.submit.acme", "baton.v1.batch.results.acme"}
    assert set(allowed.subscribe) == {"baton.v1.batch.done.acme", "_INBOX_tenant_acme.>"}
    assert not allowed.answers


def test_only_batch_reaches_tenants_streams_and_only_those_that_are() -> None:
    assert not [s for s in permissions("batch").publish if "batch-submit" in s]
    ours = [s for s in permissions("batch", [ACME]).publish if "batch-submit" in s]
    assert ours
    assert all("batch-submit-acme" in s for s in ours)
    for service in set(SERVICES) - {"batch"}:
        assert not [s for s in permissions(service, [ACME]).publish if "batch-submit" in s]


def test_the_file_is_json_with_an_account_of_services_and_one_a_tenant() -> None:
    config = json.loads(nats_config(PASSWORDS, {ACME: "secret-a", OTHER: "secret-b"}))
    assert config["max_payload"] == 8 * 1024 * 1024
    assert "authorization" not in config
    accounts = config["accounts"]
    assert [user["user"] for user in accounts[ACCOUNT]["users"]] == list(USERS)
    assert set(accounts) == {ACCOUNT, "acme", "other"}
    for tenant in ("acme", "other"):
        assert "jetstream" not in accounts[tenant]
        assert "exports" not in accounts[tenant]
        assert [user["user"] for user in accounts[tenant]["users"]] == [f"tenant-{tenant}"]
        imported = [
            (source["account"], source["subject"]) for each in accounts[tenant]["imports"] for source in each.values()
        ]
        assert {account for account, _ in imported} == {ACCOUNT}
        assert {subject for _, subject in imported} == {
            f"baton.v1.batch.{verb}.{tenant}" for verb in ("submit", "results", "done")
        }


def test_nothing_but_hops_of_tenants_is_exported_and_only_to_whom_it_names() -> None:
    exports = json.loads(nats_config(PASSWORDS))["accounts"][ACCOUNT]["exports"]
    subjects = {next(v for k, v in export.items() if k in ("service", "stream")) for export in exports}
    assert subjects == {hop.pattern for hop in HOPS if TENANT in (*hop.senders, *hop.receivers)}
    for export in exports:
        subject = export.get("service") or export.get("stream")
        assert subject.split(".")[export["account_token_position"] - 1] == "*"


def test_hops_of_tenants_are_raw_and_no_others() -> None:
    for hop in HOPS:
        assert (hop.message is bytes) == (TENANT in (*hop.senders, *hop.receivers)), hop.name


@pytest.mark.parametrize("bad", BAD_IDS)
def test_an_id_no_subject_may_hold_is_refused_by_name(bad: str, tmp_path: Path) -> None:
    credentials = ensure_credentials(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for refuse in (
        lambda: check_tenant(bad),
        lambda: tenant_permissions(TenantId(bad)),
        lambda: nats_config(PASSWORDS, {TenantId(bad): "x"}),
        lambda: add_queue_tenant(credentials, TenantId(bad)),
        lambda: remove_queue_tenant(credentials, TenantId(bad)),
    ):
        with pytest.raises(InvalidInput) as caught:
            refuse()
        assert repr(bad) in caught.value.message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tenants_come_and_go_in_the_file(tmp_path: Path) -> None:
    credentials = ensure_credentials(tmp_path)
    assert queue_tenants(credentials) == ()
    first = add_queue_tenant(credentials, ACME)
    assert add_queue_tenant(credentials, ACME) == first, "asking again prints the same credential"
    add_queue_tenant(credentials, OTHER)
    # a new start of the stack keeps them
    again = ensure_credentials(tmp_path)
    assert queue_tenants(again) == (ACME, OTHER)
    assert json.loads(again.queue_tenants.read_text()) == ["acme", "other"]
    config = json.loads(again.nats_config.read_text())
    assert config["accounts"]["acme"]["users"][0]["password"] == first
    assert config["jetstream"]["key"] == again.nats_store_key.read_text()
    assert again.queue_password(ACME).stat().st_mode & 0o077 == 0

    assert remove_queue_tenant(credentials, ACME)
    assert not remove_queue_tenant(credentials, ACME)
    assert set(json.loads(again.nats_config.read_text())["accounts"]) == {ACCOUNT, "other"}
    assert add_queue_tenant(credentials, ACME) != first, "a revoked password never comes back"


def test_accounts_of_tenants_never_meet_that_of_the_services() -> None:
    assert not is_id(ACCOUNT)
    assert not is_id("$SYS")
