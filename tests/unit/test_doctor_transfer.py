"""`./baton doctor` on KV between machines: what would not be served, or not be believed."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import Any

import pytest

from services.cli.doctor import FAIL, OK, SKIP, WARN
from services.cli.doctor_transfer import transfer
from shared.settings.sections import KvSettings
from tests.certificates import Authority

NOW = datetime.datetime.now(datetime.UTC)


def kv_of(authority: Authority, **changes: Any) -> KvSettings:
    """Over TLS, with a certificate for 127.0.0.1 unless `dns` is another name."""
    files = authority.worker("p", dns=changes.pop("dns", ""))
    tls = {"transfer_cert": files.cert, "transfer_key": files.key, "transfer_ca": files.ca}
    return KvSettings(**{**tls, **changes})


def test_what_is_served_where() -> None:
    found = transfer(KvSettings(), NOW)
    assert (found.verdict, found.fix) == (OK, "")
    assert "tcp://127.0.0.1" in found.detail
    assert "this machine alone" in found.detail
    assert transfer(KvSettings(transfer="shared-memory"), NOW).verdict == SKIP


def test_without_tls_no_other_address(tmp_path: Path) -> None:
    found = transfer(KvSettings(transfer_host="0.0.0.0"), NOW)
    assert found.verdict == FAIL
    assert "kv.transfer_cert" in found.detail


def test_a_certificate_that_decode_workers_would_refuse(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    assert transfer(kv_of(authority), NOW).verdict == OK
    other = transfer(kv_of(authority, transfer_name="prefill.example"), NOW)
    assert other.verdict == FAIL
    assert "prefill.example" in other.detail
    assert transfer(kv_of(authority, dns="localhost", transfer_name="localhost"), NOW).verdict == OK
    assert transfer(kv_of(authority), NOW + datetime.timedelta(days=60)).verdict == FAIL
    assert transfer(kv_of(authority), NOW + datetime.timedelta(days=20)).verdict == WARN


@pytest.mark.parametrize(
    ("name", "good"), [("a.example.test", True), ("b.a.example.test", False), ("example.test", False)]
)
def test_a_wildcard_is_for_one_label(tmp_path: Path, name: str, good: bool) -> None:
    found = transfer(kv_of(Authority(tmp_path), dns="*.example.test", transfer_name=name), NOW)
    # such a name is known to nobody: the certificate is what is asked about
    assert ("is not for" in found.detail) is not good


def test_ports_that_are_all_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = transfer(KvSettings(transfer_port=port), NOW)
        assert found.verdict == OK, "the next one is taken"
        assert transfer(KvSettings(transfer_host="nowhere.invalid"), NOW).verdict == FAIL
