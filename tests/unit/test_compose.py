"""compose.yaml agrees with the code: every service is there, and is given every secret it is told to read."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.compose_setup import redis_config, set_up, shares
from services.cli.credentials import ensure_credentials
from services.cli.topology import SECRET_FILES
from shared.contracts.subjects import SERVICES

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def container(service: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"][service.replace("-", "_")]
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_runs_its_own_module_with_its_own_secrets(service: str, tmp_path: Path) -> None:
    spec = container(service)
    assert spec["command"] == [f"services.{service.replace('-', '_')}"]
    given = {f"/run/baton/{name}" for name in shares(ensure_credentials(tmp_path))[service]}
    told = {value for name, value in spec["environment"].items() if name.endswith("_FILE") and "READY" not in name}
    assert told == given
    assert {n for n in spec["environment"] if n in SECRET_FILES.get(service, {})} == set(SECRET_FILES.get(service, {}))
    mounts = [v for v in spec["volumes"] if v.endswith(":/run/baton:ro")]
    assert len(mounts) == 1
    assert f"{mounts[0].split(':')[0]}:/secrets/{service}" in COMPOSE["services"]["setup"]["volumes"]


def test_no_container_can_read_another_services_secrets() -> None:
    for name, spec in COMPOSE["services"].items():
        secret_volumes = [v for v in spec.get("volumes", []) if v.startswith("secrets")]
        assert len(secret_volumes) <= 1 or name == "setup", name
        assert name == "setup" or not any(v.startswith("secrets:") for v in secret_volumes), name


def test_workers_share_one_tmpfs_of_stated_size() -> None:
    options = COMPOSE["volumes"]["kv"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "size=" in options["o"]
    for worker in ("prefill", "decode"):
        assert "kv:/kv" in container(worker)["volumes"]
        assert container(worker)["environment"]["BATON_KV_DIR"] == "/kv"


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    published = {name: spec["ports"] for name, spec in COMPOSE["services"].items() if "ports" in spec}
    assert list(published) == ["gateway"]
    assert all(port.startswith("127.0.0.1:") for port in published["gateway"])


def test_services_run_unprivileged() -> None:
    for name, spec in COMPOSE["services"].items():
        if name != "setup":
            assert spec["user"] == "10001:10001", name
    for service in SERVICES:
        assert container(service)["read_only"] is True
        assert container(service)["cap_drop"] == ["ALL"]


def test_set_up_writes_each_share_once_and_privately(tmp_path: Path) -> None:
    # Given: volumes as the engine makes them
    (tmp_path / "all").mkdir(mode=0o700)
    # When: it runs twice, as after a restart
    set_up(tmp_path, {})
    first = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    set_up(tmp_path, {})
    # Then: nothing changed, and nobody else can read it
    assert {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == first
    for path in first:
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o600, path
    assert Path("nats/nats.conf") in first
    password = (tmp_path / "all" / "redis").read_text().strip()
    assert first[Path("redis/redis.conf")].decode() == redis_config(password)
    assert not (tmp_path / "gateway" / "grant-key").exists()
