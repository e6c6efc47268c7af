"""Settings: which source wins, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.errors import SettingsError
from shared.settings.load import ROOT, as_environment, load_settings, settings_file
from shared.settings.sections import SECTIONS, Settings
from shared.settings.toml_lines import key_lines


def write(folder: Path, text: str) -> Path:
    path = folder / "baton.toml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "schema = 1\n\n[gateway]\nport = 1\nhost = 'file'\n[engine]\ndepth = 0\n")
    env = {"BATON_GATEWAY_PORT": "2", "NATS_URL": "nats://n:1", "BATON_KV_DIR": "/dev/shm/x"}
    loaded = load_settings({"gateway.port": 3, "model.path": None}, env, file)
    assert loaded.settings.gateway.port == 3
    assert loaded.settings.gateway.host == "file"
    assert loaded.settings.engine.depth == 0
    assert loaded.settings.bus.nats_url == "nats://n:1"
    assert loaded.settings.kv.dir == "/dev/shm/x"
    assert loaded.origins["gateway.port"] == "flag"
    assert loaded.origins["gateway.host"] == f"{file}:5"
    assert loaded.origins["bus.nats_url"] == "environment NATS_URL"
    assert loaded.origins["kv.block_size"] == "default"
    assert load_settings(env=env, file=file).origins["gateway.port"] == "environment BATON_GATEWAY_PORT"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("schema = 1\n[gateway]\nprot = 1\n", 3, "unknown field 'prot' in [gateway]; known are host, port"),
        ("schema = 1\n\n[gatway]\nport = 1\n", 3, "unknown section [gatway]"),
        ("schema = 1\n[gateway]\nport = '80'\n", 3, "gateway.port = '80': input should be a valid integer"),
        ("schema = 1\n[gateway]\nport = 70000\n", 3, "less than or equal to 65535"),
        ("schema = 1\n[workers]\nfake = 1\n", 3, "valid boolean"),
        ("schema = 1\n[model]\npath = '''\n[x]\n'''\ndtype = 'int3'\n", 6, "float32"),
        ("# none\n[gateway]\n", 1, "schema is missing"),
        ("\nschema = 2\n", 2, "schema is 2; this version reads schema = 1"),
        ("schema = 1\ngateway.port = true\n", 2, "valid integer"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file=file)
    assert caught.value.message.startswith(f"{file}:{line}: ")
    assert words in caught.value.message


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    file = write(tmp_path, "schema = 1\n[gateway\n")
    with pytest.raises(SettingsError, match=r"baton\.toml.*line 2"):
        load_settings(file=file)


def test_wrong_environment_and_flags_name_themselves() -> None:
    with pytest.raises(SettingsError, match=r"environment BATON_GATEWAY_PORT: gateway\.port = 'x'"):
        load_settings(env={"BATON_GATEWAY_PORT": "x"})
    with pytest.raises(SettingsError, match="environment BATON_GATEWAY_PROT: unknown field 'prot'"):
        load_settings(env={"BATON_GATEWAY_PROT": "1"})
    with pytest.raises(SettingsError, match="flag: unknown section"):
        load_settings({"nothing.at_all": 1})
    # Not settings: paths of secrets, variables of other parts.
    load_settings(env={"BATON_STATE": "x", "BATON_POLICY_KEY_FILE": "x", "BATON_READY_FILE": "x"})


def test_environment_carries_every_setting_to_a_child() -> None:
    settings = load_settings(
        {"gateway.port": 0, "workers.fake": True, "model.path": "/a b", "kv.block_size": 16}
    ).settings
    assert load_settings(env=as_environment(settings)).settings == settings


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().gateway.port = 1  # type: ignore[misc]


def test_a_chosen_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such settings file"):
        settings_file({}, str(tmp_path / "none.toml"))
    assert settings_file({"BATON_CONFIG": str(write(tmp_path, ""))}) == tmp_path / "baton.toml"


def test_every_field_is_described() -> None:
    for section in SECTIONS.values():
        assert section.__doc__
        assert all(field.description for field in section.model_fields.values())


def test_the_committed_file_shows_every_default() -> None:
    """`baton.toml` in the repository: all commented, and what the comments say is true."""
    text = (ROOT / "baton.toml").read_text()
    assert load_settings(file=ROOT / "baton.toml").settings == Settings()
    commented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    shown = {name for name in key_lines(commented) if "." in name}
    assert shown == {f"{name}.{field}" for name, section in SECTIONS.items() for field in section.model_fields}


def test_key_lines() -> None:
    text = 'a = 1\n\n[b] # c\n"d" = """\nx = 1\n"""\ne.f = 2\n'
    assert key_lines(text) == {"a": 1, "b": 3, "b.d": 4, "b.e.f": 7}
