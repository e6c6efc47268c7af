"""The headers that tell a client what is left of its limits."""

from __future__ import annotations

import pytest

from shared.contracts.ids import TenantId
from shared.contracts.quota import Quota
from shared.ingress import quotas
from shared.ingress.quotas import FRESH_S, Quotas

A = TenantId("a")


def test_what_is_left_now_and_when_all_of_it_is() -> None:
    known = Quotas()
    known.tell(Quota(A, 60, 1000, requests=10.0, tokens=400.0, held=100), 50.0)
    assert known.headers(A, "", 50.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "50",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "30s",
    }
    later = known.headers(A, "", 50.5)
    assert later is not None
    # half a second later half a request and 8.3 tokens have drained; what runs is held still
    assert (later["x-ratelimit-remaining-requests"], later["x-ratelimit-reset-requests"]) == ("50", "9.5s")
    assert later["x-ratelimit-remaining-tokens"] == "508"


def test_old_and_unknown_accounts_are_not_told() -> None:
    known = Quotas()
    known.tell(Quota(A, 60), 50.0)
    assert known.headers(A, "", 50.0 + FRESH_S + 0.01) is None
    assert known.headers(A, "", 50.0 + FRESH_S + 0.01, max_age_s=100.0) is not None
    assert known.headers(TenantId("b"), "", 50.0) is None


def test_debt_is_nothing_left_and_a_limit_that_is_none_is_not_told() -> None:
    known = Quotas()
    known.tell(Quota(A, 0, 100, tokens=350.0), 0.0)
    assert known.headers(A, "", 0.0) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "210s",
    }


def test_tenants_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_KEYS", 3)
    known = Quotas()
    for number in range(10):
        known.tell(Quota(TenantId(f"t{number}"), 60), 0.0)
    assert [known.headers(TenantId(f"t{number}"), "", 0.0) is not None for number in range(10)] == [False] * 7 + [
        True
    ] * 3


def test_places_left_are_those_of_tenant_or_key_whichever_are_fewer() -> None:
    known = Quotas()

    def told(**fields: int) -> tuple[str, str] | None:
        known.tell(Quota(A, key_id="k", **fields), 0.0)
        found = known.headers(A, "k", 0.0)
        assert found is not None
        assert not [name for name in found if "reset" in name]
        return (found["x-ratelimit-limit-parallel"], found["x-ratelimit-remaining-parallel"]) if found else None

    assert told() is None
    assert told(max_parallel=4, running=1) == ("4", "3")
    assert told(key_max_parallel=2, key_running=1, running=9) == ("2", "1")
    assert told(max_parallel=4, running=4, key_max_parallel=2, key_running=1) == ("4", "0")
    assert told(max_parallel=4, running=1, key_max_parallel=2, key_running=2) == ("2", "0")
    # a limit that was lowered below what runs
    assert told(max_parallel=2, running=5) == ("2", "0")


def test_each_key_of_a_tenant_is_told_its_own() -> None:
    known = Quotas()
    known.tell(Quota(A, key_id="k", key_max_parallel=1, key_running=1), 0.0)
    known.tell(Quota(A, key_id="l", key_max_parallel=9, key_running=1), 0.0)
    assert [known.headers(A, key, 0.0) for key in ("k", "l")] == [
        {"x-ratelimit-limit-parallel": "1", "x-ratelimit-remaining-parallel": "0"},
        {"x-ratelimit-limit-parallel": "9", "x-ratelimit-remaining-parallel": "8"},
    ]
