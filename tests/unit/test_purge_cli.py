"""`./baton purge`: options that say nothing are refused, and an order outlives a policy that restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.cli import purge
from services.policy.purge_record import OwnerAck, PurgeRecord, receipt_of
from shared.contracts import admin_messages as am
from shared.contracts.errors import Unavailable
from shared.contracts.ids import ScopeGeneration, TenantId
from shared.security.grant_signature import GrantSigner
from shared.security.receipts import sign_receipt

SIGNER = GrantSigner(Ed25519PrivateKey.generate())


def purges(complete: bool) -> am.Purges:
    record = PurgeRecord(
        purge_id="purge-1", tenant=TenantId("t"), generation=ScopeGeneration(2), ordered_s=1.0, expected=("policy",)
    )
    receipt = receipt_of(record, {"policy": OwnerAck(2.0)} if complete else {}, 3.0)
    return am.Purges(receipts=(sign_receipt(SIGNER, receipt),))


@pytest.mark.parametrize(
    ("arguments", "foreign"),
    [
        (("--tenant", "t", "--gone", "decode-1"), "--gone does not go with --tenant"),
        (("--tenant", "t", "--key", "f"), "--key does not go with --tenant"),
        (("--status", "purge-1", "--cache-only"), "--cache-only does not go with --status"),
        (("--status", "--wait", "0"), "--wait does not go with --status"),
        (("--status", "--key", "f"), "--key does not go with --status"),
        (("--verify", "f", "--remove"), "--remove does not go with --verify"),
        (("--verify", "f", "--reason", "r"), "--reason does not go with --verify"),
        (("--verify", "f", "--gone", "decode-1"), "--gone does not go with --verify"),
        (("--verify", "f", "--wait", "3"), "--wait does not go with --verify"),
        (("--wait", "3"), "one of --tenant, --status and --verify is needed"),
    ],
)
def test_options_that_would_say_nothing_are_refused(
    arguments: tuple[str, ...], foreign: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: Any) -> am.Purges:
        raise AssertionError("nothing is asked")

    monkeypatch.setattr(purge, "ask_policy", ask)
    with pytest.raises(SystemExit) as ended:
        purge.main(arguments)
    assert ended.value.code == 2
    assert foreign in capsys.readouterr().err


def test_a_policy_that_restarts_is_asked_again_and_the_id_is_told_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def ask(env: Any, message: Any, reply: Any) -> am.Purges:
        asked.append(message)
        if len(asked) == 2:
            assert "purge-1" in capsys.readouterr().err
            raise Unavailable("nobody answers")
        return purges(complete=len(asked) == 3)

    monkeypatch.setattr(purge, "ask_policy", ask)
    monkeypatch.setattr(purge, "LOOK_S", 0.0)
    assert purge.main(["--tenant", "t", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["receipt"]["complete"]
    assert [type(one) for one in asked] == [am.PurgeStart, am.PurgeQuery, am.PurgeQuery]


def test_one_that_stays_away_leaves_the_receipt_as_it_was_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(env: Any, message: Any, reply: Any) -> am.Purges:
        if isinstance(message, am.PurgeQuery):
            raise Unavailable("nobody answers")
        return purges(complete=False)

    monkeypatch.setattr(purge, "ask_policy", ask)
    monkeypatch.setattr(purge, "LOOK_S", 0.0)
    assert purge.main(["--tenant", "t", "--wait", "0.05"]) == purge.PENDING
    assert "PENDING" in capsys.readouterr().out
