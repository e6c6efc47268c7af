"""Grants: only what policy signed passes, and only while it lasts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.contracts.errors import Forbidden, SettingsError
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import RequestId, TenantId
from shared.contracts.message import encode
from shared.security.grant_signature import (
    DOMAIN,
    GrantSigner,
    GrantVerifier,
    by_id,
    load_public_keys,
    private_pem,
    public_pem,
)
from shared.store.secrets import write_private

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SIGNER = GrantSigner(KEY)


def make_grant(tenant: str = "demo", expires_s: float = 1000.0) -> Grant:
    return Grant(
        request_id=RequestId("req-1"),
        tenant=TenantId(tenant),
        scope=Scope(tenant=TenantId(tenant)),
        model="m",
        klass="interactive",
        reservation_id="req-1",
        reserved_tokens=10,
        expires_s=expires_s,
        budget_s=5.0,
    )


def verifier(cache_size: int = 4096) -> GrantVerifier:
    return GrantVerifier(by_id([SIGNER.public_key]), cache_size)


def test_a_signed_grant_comes_back_whole() -> None:
    grant = make_grant()
    assert verifier().verify(SIGNER.sign(grant), 999.9) == grant


def test_an_expired_grant_is_refused_even_when_cached() -> None:
    check, signed = verifier(), SIGNER.sign(make_grant())
    check.verify(signed, 0.0)
    with pytest.raises(Forbidden, match="expired"):
        check.verify(signed, 1000.0)
    assert check.verify_signature(signed) == make_grant()


@pytest.mark.parametrize("change", ["payload", "signature", "key_id", "swapped"])
def test_a_changed_grant_is_refused(change: str) -> None:
    signed = SIGNER.sign(make_grant())
    forged = {
        "payload": msgspec.structs.replace(signed, payload=encode(make_grant("other"))),
        "signature": msgspec.structs.replace(signed, signature=bytes(64)),
        "key_id": msgspec.structs.replace(signed, key_id="0" * 16),
        "swapped": SignedGrant(signed.signature, signed.payload, signed.key_id),
    }[change]
    check = verifier()
    check.verify(signed, 0.0)
    with pytest.raises(Forbidden) as caught:
        check.verify(forged, 0.0)
    assert caught.value.code == "grant_invalid"


def test_a_foreign_key_under_our_name_is_refused() -> None:
    other = GrantSigner(Ed25519PrivateKey.generate())
    forged = msgspec.structs.replace(other.sign(make_grant()), key_id=SIGNER.key_id)
    with pytest.raises(Forbidden):
        verifier().verify(forged, 0.0)


def test_a_signature_without_our_domain_is_refused() -> None:
    payload = encode(make_grant())
    assert DOMAIN
    with pytest.raises(Forbidden):
        verifier().verify(SignedGrant(payload, KEY.sign(payload), SIGNER.key_id), 0.0)


def test_a_scope_of_another_tenant_is_refused_though_signed() -> None:
    grant = msgspec.structs.replace(make_grant("a"), scope=Scope(tenant=TenantId("b")))
    with pytest.raises(Forbidden, match="scope"):
        verifier().verify(SIGNER.sign(grant), 0.0)


def test_the_cache_is_bounded() -> None:
    check = verifier(cache_size=2)
    for expires_s in (1.0, 2.0, 3.0, 4.0):
        check.verify(SIGNER.sign(make_grant(expires_s=expires_s)), 0.0)
    assert len(check._verified) == 2


def test_keys_travel_by_file(tmp_path: Path) -> None:
    older = Ed25519PrivateKey.generate()
    write_private(tmp_path / "private", private_pem(KEY))
    (tmp_path / "public").write_bytes(public_pem(SIGNER.public_key) + public_pem(older.public_key()))
    signer = GrantSigner.from_file(tmp_path / "private")
    check = GrantVerifier(load_public_keys(tmp_path / "public"))
    check.verify(signer.sign(make_grant()), 0.0)
    check.verify(GrantSigner(older).sign(make_grant()), 0.0)


def test_a_missing_or_wrong_key_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        GrantSigner.from_file(tmp_path / "none")
    write_private(tmp_path / "text", b"no key")
    with pytest.raises(SettingsError):
        GrantSigner.from_file(tmp_path / "text")
    with pytest.raises(SettingsError):
        load_public_keys(tmp_path / "text")
