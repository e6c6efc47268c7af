"""Sealed values and secret files."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from shared.contracts.errors import Internal, SettingsError
from shared.contracts.ids import TenantId
from shared.store.sealed import Sealer
from shared.store.secrets import ensure_secret, random_key, random_password, read_secret, secret_path, write_private

A, B = TenantId("a"), TenantId("b")


def test_round_trip_and_never_twice_the_same() -> None:
    sealer = Sealer(bytes(32))
    first, second = sealer.seal(A, "x", b"text"), sealer.seal(A, "x", b"text")
    assert first != second
    assert b"text" not in first
    assert len(first) == len(b"text") + 29
    assert sealer.unseal(A, "x", first) == sealer.unseal(A, "x", second) == b"text"
    assert sealer.unseal(A, "x", sealer.seal(A, "x", b"")) == b""


def test_moved_altered_or_foreign_values_do_not_open() -> None:
    sealer = Sealer(bytes(32))
    sealed = sealer.seal(A, "bc", b"text")
    flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for attempt in (
        lambda: sealer.unseal(B, "bc", sealed),
        lambda: sealer.unseal(A, "bd", sealed),
        lambda: sealer.unseal(TenantId("ab"), "c", sealed),
        lambda: sealer.unseal(A, "bc", flipped),
        lambda: sealer.unseal(A, "bc", b""),
        lambda: sealer.unseal(A, "bc", b"\x02" + sealed[1:]),
        lambda: Sealer(b"\x01" * 32).unseal(A, "bc", sealed),
    ):
        with pytest.raises(Internal):
            attempt()


def test_a_short_master_key_is_refused() -> None:
    with pytest.raises(SettingsError, match="32"):
        Sealer(b"short")


def test_secrets_are_made_once_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = ensure_secret(path, random_key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_secret(path, random_key) == first
    assert [p.name for p in tmp_path.iterdir()] == ["key"]
    assert len(random_password()) > 40


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_private(path, b"x")
    path.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_secret(path)


def test_missing_and_empty_secrets_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_secret(tmp_path / "none")
    write_private(tmp_path / "empty", b"")
    with pytest.raises(SettingsError, match="empty"):
        read_secret(tmp_path / "empty")
    with pytest.raises(SettingsError, match="BATON_X_FILE is not set"):
        secret_path({}, "BATON_X_FILE")


def test_a_mark_compares_and_tells_nothing_without_the_master_key() -> None:
    ann, bob = TenantId("ann"), TenantId("bob")
    one, other = Sealer(bytes(32)), Sealer(bytes(range(32)))
    assert one.mark(ann, "invoice 1") == Sealer(bytes(32)).mark(ann, "invoice 1")
    marks = {
        one.mark(ann, "invoice 1"),
        one.mark(ann, "invoice 2"),
        one.mark(bob, "invoice 1"),
        other.mark(ann, "invoice 1"),
    }
    assert len(marks) == 4
    assert hashlib.blake2b(b"invoice 1", digest_size=16).hexdigest() not in marks
