"""`./baton config`: what is wrong, what is in force, and nothing secret on the screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli import config
from shared.settings.load import ROOT, load_settings
from shared.settings.sections import SECTIONS


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NATS_URL", "REDIS_URL", "BATON_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def settings(tmp_path: Path, text: str) -> str:
    path = tmp_path / "baton.toml"
    path.write_text("schema = 1\n" + text)
    return str(path)


def test_the_shipped_file_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.main(["check", "--config", str(ROOT / "baton.toml")]) == 0
    assert capsys.readouterr().out.endswith("baton.toml: ok\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nmax_sequences = 512\n", ["engine.token_budget = 192", "engine.prefill_token_budget = 512"]),
        ("[model]\npath = '/nowhere/at/all'\n", ["model.path = '/nowhere/at/all': no such folder"]),
        ("[policy]\ntenants = '/nowhere/tenants.json'\n", ["policy.tenants", "no such file"]),
        ("[kv]\ndir = '/nowhere/kv'\n", ["kv.dir", "parent folder does not exist"]),
        ("[gateway]\ntls_cert = 'x.pem'\n", ["baton.toml:3", "gateway.tls_key", "TLS needs both files"]),
        ("[kv]\ntransfer_cert = 'x.pem'\n", ["baton.toml:3", "kv.transfer_key", "TLS needs all three files"]),
        ("[kv]\ntransfer_host = '0.0.0.0'\n", ["baton.toml:3", "kv.transfer_host", "leaves by TLS only"]),
        ("[gateway]\ncors_origins = 'here'\n", ["baton.toml:3", "gateway.cors_origins = 'here'", "is no origin"]),
        ("[gateway]\ntrusted_proxies = 'here'\n", ["baton.toml:3", "gateway.trusted_proxies", "is no address"]),
        ("[gateway]\nport = 70000\n", ["baton.toml:3", "gateway.port", "65535"]),
        ("[gateway]\nprot = 1\n", ["baton.toml:3", "unknown field 'prot'"]),
        ("[gatewya]\n", ["baton.toml:2", "unknown section [gatewya]"]),
        ("gateway = 1\n", ["unknown section [gateway]"]),
        ("[gateway\n", ["baton.toml"]),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, text: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert config.main(["check", "--config", settings(tmp_path, text)]) == config.EXIT_WRONG
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_everything_wrong_is_told_in_one_go_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_LOG_LEVEL", "loud")
    path = settings(
        tmp_path,
        "[gateway]\nport = 'x'\n[engin]\n[kv]\ndir = '/nowhere/kv'\n[engine]\nprot = 1\nmax_sequences = 512\n"
        "[[models]]\nname = ''\nalias = 1\ndtype = 'int3'\n",
    )
    assert config.main(["check", "--config", path]) == config.EXIT_WRONG
    told = [line.removeprefix(f"baton config: {path}:") for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(":")[0] for line in told[:6]] == ["3", "4", "8", "11", "12", "13"]
    assert told[6].startswith("baton config: environment BATON_LOG_LEVEL: log.level = 'loud'")
    # What is wrong only beside another value is told with the place where somebody set one of them
    assert told[7].startswith("9: engine.token_budget = 192 must exceed engine.max_sequences = 512")
    assert told[9] == "6: kv.dir = '/nowhere/kv': its parent folder does not exist"
    assert len(told) == 10


def test_a_value_that_is_wrong_by_itself_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings(tmp_path, "[engine]\nmax_sequences = 500\ntoken_budget = 'x'\nprefill_token_budget = 501\n")
    assert config.main(["check", "--json", "--config", path]) == config.EXIT_WRONG
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["ok"]) == (path, False)
    assert told["problems"] == [f"{path}:4: engine.token_budget = 'x': input should be a valid integer"]


def test_a_tenants_file_that_others_can_read_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text("{}")
    tenants.chmod(0o644)
    path = settings(tmp_path, f"[policy]\ntenants = '{tenants}'\n")
    assert config.main(["check", "--config", path]) == config.EXIT_WRONG
    assert "mode 0644" in capsys.readouterr().err
    tenants.chmod(0o600)
    assert config.main(["check", "--config", path]) == 0


def test_every_value_is_shown_with_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_GATEWAY_HOST", "0.0.0.0")
    path = settings(tmp_path, "[gateway]\nport = 9\n")
    assert config.main(["show", "--json", "--config", path]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gateway.port"] == {"value": 9, "origin": f"{path}:3"}
    assert shown["gateway.host"] == {"value": "0.0.0.0", "origin": "environment BATON_GATEWAY_HOST"}
    assert shown["gateway.max_body_bytes"]["origin"] == "default"
    fields = {f"{section}.{field}" for section, table in SECTIONS.items() for field in table.model_fields}
    assert fields <= set(shown)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:hunter2@host:4222", "nats://user:***@host:4222"),
        ("nats://hunter2@host:4222", "nats://***@host:4222"),
        ("redis://:hunter2@host/0", "redis://***@host/0"),
        ("nats://host:4222", "nats://host:4222"),
    ],
)
def test_passwords_in_addresses_are_masked(url: str, shown: str) -> None:
    text = "\n".join(config.lines(load_settings(env={"NATS_URL": url, "REDIS_URL": url})))
    assert text.count(shown) == 2
    assert "hunter2" not in text


def test_the_schema_takes_the_shipped_file_and_names_every_field() -> None:
    found = config.schema()
    assert found["required"] == ["schema"]
    assert set(SECTIONS) <= set(found["properties"])
    sections = {name: found["$defs"][table.__name__] for name, table in SECTIONS.items()}
    assert all(set(table.model_fields) == set(sections[name]["properties"]) for name, table in SECTIONS.items())
    assert sections["gateway"]["properties"]["port"]["maximum"] == 65535
