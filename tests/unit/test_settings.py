"""Settings: which source wins, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.errors import SettingsError
from shared.settings.load import ROOT, as_environment, load_settings, settings_file
from shared.settings.models import for_model, num_workers, only_model, pool_name, served_models
from shared.settings.sections import SECTIONS, ModelEntry, Settings
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
    with pytest.raises(SettingsError, match=r"baton\.toml:2: not TOML: "):
        load_settings(file=file)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "schema = 1\n[gateway]\nprot = 1\nport = 'x'\n")
    with pytest.raises(SettingsError) as caught:
        load_settings({"kv.dirr": "x"}, {"BATON_ENGINE_DEPTH": "7"}, file)
    told = caught.value.message.splitlines()
    assert [line.partition(": ")[0] for line in told] == [
        f"{file}:3",
        f"{file}:4",
        "flag",
        "environment BATON_ENGINE_DEPTH",
    ]
    assert caught.value.param == "gateway.prot"


@pytest.mark.parametrize("content", [b"schema = 1\na = '\xff'", b"\x00", b"schema = 1\na = [\n"])
def test_what_is_no_toml_is_plain(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "baton.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"baton\.toml(:\d+)?: not (TOML|UTF-8 text)"):
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
    for section in (*SECTIONS.values(), ModelEntry):
        assert section.__doc__
        assert all(field.description for field in section.model_fields.values())


def test_the_committed_file_shows_every_default() -> None:
    """`baton.toml` in the repository: all commented, and what the comments say is true."""
    text = (ROOT / "baton.toml").read_text()
    assert load_settings(file=ROOT / "baton.toml").settings == Settings()
    commented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    shown = {name for name in key_lines(commented) if "." in name}
    assert shown == {f"{name}.{field}" for name, section in SECTIONS.items() for field in section.model_fields}


MODELS = """schema = 1
[workers]
decode = 2
[[models]]
name = "Big/One.5"
path = "/big"
aliases = ["big", "gpt"]
[[models]]  # the other
name = "small"
dtype = "bfloat16"
pool = "s"
prefill = 0
pool_bytes = 1000
"""


def test_several_models(tmp_path: Path) -> None:
    file = write(tmp_path, MODELS)
    loaded = load_settings(file=file)
    big, small = served_models(loaded.settings)
    assert (big.name, big.path, big.aliases, big.dtype, big.pool) == (
        "Big/One.5",
        "/big",
        ("big", "gpt"),
        "auto",
        "big-one-5",
    )
    assert (big.prefill, big.decode, big.pool_bytes) == (1, 2, 0)
    assert (small.dtype, small.pool, small.prefill, small.decode, small.pool_bytes) == ("bfloat16", "s", 0, 2, 1000)
    assert num_workers(loaded.settings) == 5
    assert loaded.origins["models.0.name"] == f"{file}:5"
    assert loaded.origins["models.1.pool_bytes"] == f"{file}:13"
    assert loaded.origins["models.1.path"] == "default"
    with pytest.raises(SettingsError, match=r"serves one of the models Big/One\.5, small"):
        only_model(loaded.settings)
    # to children: all of them, or one in the short form, whatever the file says
    assert load_settings(env=as_environment(loaded.settings), file=file).settings == loaded.settings
    own = for_model(loaded.settings, small)
    assert load_settings(env=as_environment(own), file=file).settings == own
    assert only_model(own).pool == "s"
    assert (own.model.name, own.workers.prefill, own.kv.pool_bytes) == ("small", 0, 1000)


def test_the_short_form_is_one_model() -> None:
    (model,) = served_models(load_settings({"model.name": "x", "workers.decode": 3, "kv.pool_bytes": 7}).settings)
    assert (model.name, model.pool, model.prefill, model.decode, model.pool_bytes) == ("x", "default", 1, 3, 7)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("schema = 1\n[[models]]\nname = 'a'\n[model]\nname = 'b'\n", 5, ":2: [[models]] are both given"),
        ("schema = 1\n[[models]]\nname = 'a'\ndtyp = 'x'\n", 4, "unknown field 'dtyp' in [[models]]; known are name"),
        ("schema = 1\n[[models]]\nname = 'a'\n[[models]]\nname = 'b'\ndtype = 'int3'\n", 6, "models.1.dtype = 'int3'"),
        ("schema = 1\n[[models]]\nname = 'a'\n[[models]]\npath = '/b'\n", 4, "models.1.name: field required"),
        ("schema = 1\n[[models]]\nname = 'a'\ndecode = '2'\n", 4, "models.0.decode = '2'"),
        ("schema = 1\n[[models]]\nname = 'a'\npool = 'A b'\n", 4, "models.0.pool = 'A b'"),
        ("schema = 1\n[[models]]\nname = 'a'\n[[models]]\nname = 'a'\n", 4, "names must differ: 'a'"),
        ("schema = 1\n[[models]]\nname = 'a'\n[[models]]\nname = 'b'\naliases = ['a']\n", 4, "names must differ"),
        ("schema = 1\n[[models]]\nname = 'a.b'\n[[models]]\nname = 'a-b'\n", 4, "pools must differ: 'a-b'"),
        ("schema = 1\n[models]\nname = 'a'\n", 2, "must be [[models]] tables"),
        ("schema = 1\nmodels = ['a']\n", 2, "must be [[models]] tables"),
    ],
)
def test_wrong_models_are_refused_with_their_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file=file)
    assert caught.value.message.startswith(f"{file}:{line}: ")
    assert words in caught.value.message
    assert "\n" not in caught.value.message, "one fault is told once"


def test_models_from_the_environment_stand_for_all_a_file_says_of_them(tmp_path: Path) -> None:
    single = write(tmp_path, "schema = 1\n[model]\nname = 'file'\n")
    env = {"BATON_MODELS": '[{"name": "a"}, {"name": "b", "aliases": ["c"]}]'}
    assert [m.name for m in served_models(load_settings(env=env, file=single).settings)] == ["a", "b"]
    several = write(tmp_path, MODELS)
    env = {"BATON_MODELS": "[]", "BATON_MODEL_NAME": "own"}
    assert [m.name for m in served_models(load_settings(env=env, file=several).settings)] == ["own"]
    with pytest.raises(SettingsError, match=r"flag: model\.path and .*baton\.toml:4: \[\[models\]\] are both given"):
        load_settings({"model.path": "/x"}, file=several)
    with pytest.raises(SettingsError, match="environment BATON_MODELS: not JSON"):
        load_settings(env={"BATON_MODELS": "{"})
    with pytest.raises(SettingsError, match=r"environment BATON_MODELS: models\.0\.prefill"):
        load_settings(env={"BATON_MODELS": '[{"name": "a", "prefill": -1}]'})


@pytest.mark.parametrize(
    ("model", "pool"),
    [("Qwen/Qwen2.5-0.5B", "qwen-qwen2-5-0-5b"), ("a" * 60, "a" * 40), ("日本", "model"), ("-x-", "x")],
)
def test_a_pool_is_named_after_its_model(model: str, pool: str) -> None:
    assert pool_name(model) == pool


def test_key_lines() -> None:
    text = 'a = 1\n\n[b] # c\n"d" = """\nx = 1\n"""\ne.f = 2\n'
    assert key_lines(text) == {"a": 1, "b": 3, "b.d": 4, "b.e.f": 7}
    arrays = "[[m]]\na = 1\n[x]\na = 1\n[[ m ]] # c\na = 2\n"
    assert key_lines(arrays) == {"m": 1, "m.0": 1, "m.0.a": 2, "x": 3, "x.a": 4, "m.1": 5, "m.1.a": 6}
