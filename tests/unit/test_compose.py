"""compose.yaml agrees with the code: every service is there, and is given every secret it is told to read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels.native.build import SHIPPED
from services.cli.compose_model import ensure_model
from services.cli.compose_setup import is_somebodys, nats_key, redis_config, set_up, shares
from services.cli.credentials import ensure_credentials
from services.cli.servers import NATS_CORES, nats_cores
from services.cli.topology import SECRET_FILES
from shared.contracts.errors import InvalidInput, SettingsError
from shared.contracts.subjects import SERVICES
from shared.model.fetch import cache_dir, default_model_dir
from shared.settings.load import load_settings
from tests.compose.file import resolved

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


ENV_FILES = {"default": [], "observe": ["deploy/observe.env"], "gpu": ["deploy/gpu.env"]}
OBSERVE = {"jaeger", "prometheus", "grafana"}
GPU = {"prefill-gpu", "decode-gpu"}


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


def test_workers_keep_what_they_pack_in_one_volume() -> None:
    services = resolved("--profile", "gpu")["services"]
    for name in ("prefill", "decode", "prefill-gpu", "decode-gpu"):
        caches = [volume for volume in services[name]["volumes"] if volume["source"] == "cache"]
        assert [(volume["target"], volume.get("read_only", False)) for volume in caches] == [("/cache", False)], name
        assert cache_dir(services[name]["environment"]) == Path("/cache")
        assert services[name]["environment"]["TRITON_CACHE_DIR"].startswith("/cache/")
        assert services[name]["read_only"] is True
    # nobody else may write it, and `setup` gives it to the services' user
    users = {name for name, spec in services.items() for volume in spec["volumes"] if volume["source"] == "cache"}
    assert users == {"setup", "prefill", "decode", "prefill-gpu", "decode-gpu"}
    setup = services["setup"]
    given = next(volume["target"] for volume in setup["volumes"] if volume["source"] == "cache")
    assert given in setup["environment"]["BATON_DATA_VOLUMES"].split(":")


def test_the_image_looks_for_native_kernels_where_they_are_shipped() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    folder = next(line for line in lines if "kernels.native.ship" in line).split()[-1]
    assert f"COPY --from=kernels {folder} {folder}" in lines
    told = dict(word.split("=") for line in lines if line.startswith("ENV ") for word in line.split()[1:])
    assert told[SHIPPED] == folder


def test_the_dtype_is_that_of_the_settings_unless_it_is_named() -> None:
    def told(**variables: str) -> set[str | None]:
        services = resolved(**variables)["services"]
        return {services[name]["environment"].get("BATON_MODEL_DTYPE") for name in ("prefill", "decode", "gateway")}

    assert told() == {None}
    assert told(BATON_MODEL_DTYPE="bfloat16") == {"bfloat16"}


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    published = {name: spec["ports"] for name, spec in COMPOSE["services"].items() if "ports" in spec}
    assert published.keys() - OBSERVE == {"gateway"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_services_run_unprivileged() -> None:
    for name, spec in COMPOSE["services"].items():
        if name not in OBSERVE | {"setup"}:
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


@pytest.mark.parametrize("profile", ENV_FILES)
def test_the_file_is_valid_with_every_profile(profile: str) -> None:
    files = [part for file in ENV_FILES[profile] for part in ("--env-file", file)]
    services = set(resolved(*files)["services"])
    usual = {name.replace("-", "_") for name in SERVICES} | {"setup", "model", "nats", "redis"}
    assert services == usual | {"default": set(), "observe": OBSERVE, "gpu": GPU}[profile]


def test_profiles_change_nothing_for_who_does_not_ask() -> None:
    plain = resolved()["services"]
    assert plain["gateway"]["environment"]["BATON_TELEMETRY_OTLP_ENDPOINT"] == ""
    assert plain["prefill"]["scale"] == plain["decode"]["scale"] == 1
    assert not any("devices" in json.dumps(spec.get("deploy", {})) for spec in plain.values())


def test_observe_sends_traces_to_its_jaeger() -> None:
    services = resolved("--env-file", "deploy/observe.env")["services"]
    told = {services[name.replace("-", "_")]["environment"]["BATON_TELEMETRY_OTLP_ENDPOINT"] for name in SERVICES}
    assert told == {"http://jaeger:4318"}


def test_gpu_workers_take_the_place_of_the_others() -> None:
    services = resolved("--env-file", "deploy/gpu.env", BATON_GPUS="2")["services"]
    for role in ("prefill", "decode"):
        usual, gpu = services[role], services[f"{role}-gpu"]
        assert (usual["scale"], gpu["scale"]) == (0, 1)
        assert gpu["image"] != usual["image"]
        assert gpu["build"]["args"]["EXTRA"] == "gpu"
        devices = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert devices == [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}]
        assert {name: usual[name] for name in ("command", "environment", "volumes")} == {
            name: gpu[name] for name in ("command", "environment", "volumes")
        }
        assert role in gpu["networks"]["default"]["aliases"]


def test_what_containers_are_told_are_settings_there_are() -> None:
    for name, spec in resolved(BATON_TELEMETRY_OTLP_ENDPOINT="http://jaeger:4318")["services"].items():
        if name not in ("setup", "model", "nats", "redis"):
            told = {key: value for key, value in spec["environment"].items() if value is not None}
            load_settings(env=told, file=ROOT / "baton.toml")


def test_nats_has_one_core_unless_more_are_named() -> None:
    assert resolved()["services"]["nats"]["environment"] == {NATS_CORES: str(nats_cores(2))}
    assert resolved(BATON_NATS_CORES="4")["services"]["nats"]["environment"] == {NATS_CORES: "4"}


def test_another_image_is_named_in_one_place() -> None:
    variables = {f"BATON_{name.upper()}_IMAGE": f"registry.test/{name}:1" for name in ("nats", "redis", *OBSERVE)}
    services = resolved("--profile", "observe", **variables)["services"]
    images = {name: spec["image"] for name, spec in services.items() if "build" not in spec}
    assert images == {name: f"registry.test/{name}:1" for name in ("nats", "redis", *OBSERVE)}
    assert all(":" in image.rpartition("/")[2] for image in images.values())


def test_another_folder_of_models_reaches_whoever_reads_models() -> None:
    services = resolved(BATON_MODELS="/srv/models")["services"]
    sources = {
        name: volume["source"]
        for name, spec in services.items()
        for volume in spec.get("volumes", [])
        if volume["target"] in ("/models", "/data/models")
    }
    assert sources == dict.fromkeys(("setup", "model", "gateway", "batch", "prefill", "decode"), "/srv/models")


def test_a_folder_with_somebodys_files_keeps_its_owner(tmp_path: Path) -> None:
    # Given: a fresh volume, a folder with models in it, and a volume the services have used
    for name in ("fresh", "own", "used"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "config.json").touch()
    (tmp_path / "used" / "dump").touch()
    me = os.getuid()
    # Then: only the one with another's files is left alone
    assert not is_somebodys(tmp_path / "fresh", me + 1)
    assert is_somebodys(tmp_path / "own", me + 1)
    assert not is_somebodys(tmp_path / "used", me)


def test_the_default_model_is_fetched_and_another_must_be_there(tmp_path: Path) -> None:
    fetched: list[Path] = []

    def fetch(cache: Path, say: object) -> Path:
        fetched.append(cache)
        return default_model_dir(cache)

    default, other = default_model_dir(tmp_path), tmp_path / "other"
    env = {"BATON_CACHE": str(tmp_path)}
    # When: the default model is wanted, by its path or by nothing
    for wanted in ({}, {"BATON_MODEL_PATH": ""}, {"BATON_MODEL_PATH": str(default)}):
        assert ensure_model(env | wanted, print, fetch) == default
    assert fetched == [tmp_path] * 3
    # When: another is wanted that is not there
    with pytest.raises(SettingsError, match=r"other: no config\.json"):
        ensure_model(env | {"BATON_MODEL_PATH": str(other)}, print, fetch)
    # Then: once it is, nothing is fetched
    other.mkdir()
    (other / "config.json").touch()
    assert ensure_model(env | {"BATON_MODEL_PATH": str(other)}, print, fetch) == other
    assert len(fetched) == 3


def test_a_tenants_queue_key_reaches_the_volumes_of_nats_and_batch(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir(mode=0o700)
    set_up(tmp_path, {})
    text = nats_key(tmp_path, "acme", {"BATON_QUEUE_URL": "nats://queue:4222"})
    password = (tmp_path / "all" / "queue-tenant-acme").read_text()
    assert password in text
    assert "nats://queue:4222" in text
    assert "kill -s HUP nats" in text
    assert password in (tmp_path / "nats" / "nats.conf").read_text()
    assert (tmp_path / "batch" / "queue-tenants").read_text() == '["acme"]'
    before = (tmp_path / "nats" / "nats.conf").read_bytes()
    with pytest.raises(InvalidInput, match=r"acme\.x"):
        nats_key(tmp_path, "acme.x", {})
    assert (tmp_path / "nats" / "nats.conf").read_bytes() == before
