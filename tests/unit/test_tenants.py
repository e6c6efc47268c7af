"""Tenants, keys, admission and the bootstrap file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.policy import admission, quota
from services.policy.bootstrap import read_bootstrap
from services.policy.settings import policy_defaults
from services.policy.tenants import KeyRecord, OwnLimits, TenantRecord, check_key, effective_limits, identity
from shared.contracts.errors import BatonError, SettingsError, Unauthenticated
from shared.contracts.grants import Limits
from shared.contracts.ids import RequestId, ScopeGeneration, TenantId
from shared.contracts.messages import Admit
from shared.settings.sections import PolicySettings, Settings

HASH = hashlib.sha256(b"key").digest()
KEY = KeyRecord(id="k", tenant=TenantId("demo"), hash=HASH.hex())
DEMO = TenantRecord(id=TenantId("demo"), generation=ScopeGeneration(4), weight=2.0, retention_s=60, version=9)
TERMS = admission.Terms(budget_s={"interactive": 10.0, "analysis": 20.0, "batch": 30.0}, margin_s=5.0)


def ask(**fields: object) -> Admit:
    asked = {"request_id": RequestId("req-1"), "key_hash": HASH, "model": "m", "num_prompt_tokens": 10, "max_tokens": 5}
    return Admit(**{**asked, **fields})  # type: ignore[arg-type]


def test_the_live_key_of_this_hash_passes() -> None:
    assert check_key(HASH, KEY) is KEY


@pytest.mark.parametrize(
    ("key_hash", "key"),
    [
        (HASH, None),
        (HASH, msgspec.structs.replace(KEY, revoked=True)),
        (hashlib.sha256(b"other").digest(), KEY),
        (b"", msgspec.structs.replace(KEY, hash="")),
    ],
    ids=["unknown", "revoked", "other hash", "empty"],
)
def test_every_other_key_gets_the_same_answer(key_hash: bytes, key: KeyRecord | None) -> None:
    with pytest.raises(Unauthenticated, match=r"^the API key is not valid$"):
        check_key(key_hash, key)


def test_own_limits_win_over_defaults_and_zero_lifts_them() -> None:
    defaults = Limits(requests_per_minute=5, tokens_per_minute=6)
    own = OwnLimits(requests_per_minute=0, max_output_tokens=7)
    assert effective_limits(own, defaults) == Limits(0, 6, 0, 7)


def test_identity_names_the_tenant_and_its_defaults() -> None:
    found = identity(DEMO, KEY, Limits(), 1024)
    assert (found.tenant, found.key_id, found.admin, found.default_max_tokens, found.version) == (
        "demo",
        "k",
        False,
        1024,
        9,
    )


def test_reserved_is_the_prompt_once_and_every_choice() -> None:
    assert admission.reserved_tokens(ask(choices=3)) == 25


@pytest.mark.parametrize(
    ("asked", "tenant", "limits", "code", "param"),
    [
        (ask(num_prompt_tokens=0), DEMO, Limits(), "invalid_value", "num_prompt_tokens"),
        (ask(max_tokens=-1), DEMO, Limits(), "invalid_value", "max_tokens"),
        (ask(choices=0), DEMO, Limits(), "invalid_value", "choices"),
        (ask(), msgspec.structs.replace(DEMO, models=("x",)), Limits(), "model_not_found", "model"),
        (ask(), DEMO, Limits(max_context_tokens=14), "context_length_exceeded", "messages"),
        (ask(), DEMO, Limits(max_output_tokens=4), "invalid_value", "max_tokens"),
        (ask(max_tokens=10**9), DEMO, Limits(), "invalid_value", "max_tokens"),
        (ask(klass="vip"), DEMO, Limits(), "invalid_value", "class"),
    ],
)
def test_admission_names_the_field(asked: Admit, tenant: TenantRecord, limits: Limits, code: str, param: str) -> None:
    with pytest.raises(BatonError) as caught:
        admission.check(asked, tenant, limits)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_limits_are_inclusive_and_the_class_has_a_default() -> None:
    assert admission.check(ask(), DEMO, Limits(max_context_tokens=15, max_output_tokens=5)) == "interactive"
    assert admission.check(ask(klass="batch"), DEMO, Limits()) == "batch"


def test_nobody_rises_above_the_class_of_the_tenant() -> None:
    modest = msgspec.structs.replace(DEMO, klass="analysis")
    found = [admission.check(ask(klass=klass), modest, Limits()) for klass in ("", "interactive", "analysis", "batch")]
    assert found == ["analysis", "analysis", "analysis", "batch"]


def test_the_grant_derives_its_scope_from_the_record() -> None:
    grant = admission.make_grant(ask(), DEMO, Limits(), "analysis", 1000.0, TERMS)
    assert (grant.scope.tenant, grant.scope.authorization, grant.scope.generation) == ("demo", (), 4)
    assert (grant.budget_s, grant.expires_s, grant.reserved_tokens) == (20.0, 1025.0, 15)
    assert (grant.weight, grant.retention_s, grant.policy_version, grant.reservation_id) == (2.0, 60, 9, "req-1")


def test_quota_refusals_name_the_limit_and_when_to_come_back() -> None:
    limits = Limits(requests_per_minute=3, tokens_per_minute=4)
    error, never = admission.refusal(quota.Verdict(quota.REQUESTS, 1_500_000), limits)
    assert (error.status, error.param, error.retry_after_s, never) == (429, "requests_per_minute", 1.5, False)
    error, never = admission.refusal(quota.Verdict(quota.TOO_LARGE), limits)
    assert (error.status, error.code, error.retry_after_s, never) == (429, "request_too_large", 0.0, True)


def write(path: Path, content: object, mode: int = 0o600) -> Path:
    path.write_text(json.dumps(content))
    path.chmod(mode)
    return path


def test_a_bootstrap_file_is_read(tmp_path: Path) -> None:
    key = {"id": "demo", "hash": HASH.hex(), "admin": True}
    content = {"tenants": [{"id": "demo", "keys": [key], "limits": {"tokens_per_minute": 5}}]}
    (tenant,) = read_bootstrap(write(tmp_path / "b", content)).tenants
    assert tenant.keys[0].admin
    assert tenant.limits == OwnLimits(tokens_per_minute=5)
    assert tenant.keys[0].limit == 0
    assert b"max_parallel" not in msgspec.json.encode(tenant)  # its digest is that of earlier versions
    content = {"tenants": [{"id": "demo", "keys": [{**key, "max_parallel": 3}], "limits": {"max_parallel": 5}}]}
    (tenant,) = read_bootstrap(write(tmp_path / "c", content)).tenants
    assert (tenant.keys[0].limit, tenant.limits.max_parallel) == (3, 5)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"tenants": [{"id": "demo", "color": 1}]}, "color"),
        ({"tenants": [{"id": "demo", "limits": {"per_hour": 1}}]}, "per_hour"),
        ({"tenants": [], "extra": 1}, "extra"),
        ({"tenants": [{"id": "Demo"}]}, "Demo"),
        ({"tenants": [{"id": "demo", "keys": [{"id": "k", "hash": "ab"}]}]}, "hash"),
        ({"tenants": [{"id": "demo", "limits": {"tokens_per_minute": -1}}]}, "tokens_per_minute"),
        ({"tenants": [{"id": "demo", "keys": [{"id": "k", "hash": HASH.hex(), "max_parallel": -1}]}]}, "max_parallel"),
        ({"tenants": [{"id": "demo", "klass": "vip"}]}, "vip"),
    ],
)
def test_a_wrong_bootstrap_file_is_refused_by_name(tmp_path: Path, content: object, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        read_bootstrap(write(tmp_path / "b", content))


def test_a_bootstrap_file_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="0644"):
        read_bootstrap(write(tmp_path / "b", {"tenants": []}, 0o644))


def test_every_setting_of_policy_is_in_force() -> None:
    values: dict[str, Any] = {name: 77 for name in PolicySettings.model_fields if name != "tenants"}
    made = policy_defaults(Settings(policy=PolicySettings(**values)))
    assert (made.limits, made.max_tokens) == (Limits(77, 77, max_parallel=77), 77)
    assert made.terms.budget_s == dict.fromkeys(admission.CLASSES, 77.0)
