"""Several models in one stack: which processes there are, and what each is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.config import problems
from services.cli.stack_models import with_models, with_resources
from services.cli.topology import instance_names, process_settings, stop_order
from services.scheduler.settings import scheduler_config
from shared.contracts.errors import SettingsError
from shared.ingress.served_models import ServedModels, load_models
from shared.settings.load import LoadedSettings, as_environment, load_settings
from shared.settings.models import only_model, served_models
from shared.settings.sections import ModelEntry, Settings
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import tokenizer_json

NO_ENV: dict[str, str] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1, max_position_embeddings=64)
    (made / "tokenizer.json").write_bytes(tokenizer_json())
    (made / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5, "top_p": 0.75}')
    return made


@pytest.fixture
def settings(folder: Path) -> Settings:
    entries = (
        ModelEntry(name="big", path=str(folder), aliases=("gpt",), prefill=2),
        ModelEntry(name="small", path=str(folder), dtype="bfloat16", prefill=0, decode=2, pool_bytes=1 << 20),
    )
    return Settings(models=entries)


def test_each_pool_has_a_scheduler_and_workers_of_its_own(settings: Settings) -> None:
    names = instance_names(settings)
    pools = ["scheduler-big", "scheduler-small"]
    workers = ["prefill-big-1", "prefill-big-2", "decode-big-1", "decode-small-1", "decode-small-2"]
    assert [name for name in names if name not in instance_names(Settings())] == pools + workers
    assert "scheduler" not in names
    assert (names["decode-small-2"], names["scheduler-big"]) == ("decode", "scheduler")
    order = stop_order(settings)
    assert pools in order
    assert sorted(name for group in order for name in group) == sorted([*names, "nats", "redis"])


def test_schedulers_and_workers_are_told_their_own_model_and_the_others_all(settings: Settings) -> None:
    told = {name: process_settings(settings, name) for name in instance_names(settings)}
    for name in ("gateway", "batch", "prefix-cache-index", "policy"):
        assert load_settings(env=as_environment(told[name])).settings == settings
    own = load_settings(env=as_environment(told["decode-small-1"])).settings
    model = only_model(own)
    assert (model.name, model.pool, model.dtype, model.pool_bytes) == ("small", "small", "bfloat16", 1 << 20)
    assert own.kv.pool_bytes == 1 << 20
    assert scheduler_config(told["scheduler-big"], "s").pool == "big"
    with pytest.raises(SettingsError, match="one of the models big, small"):
        scheduler_config(settings, "s")


def test_folders_are_found_and_looked_at(settings: Settings, folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert with_models(settings, NO_ENV, said.append) == settings
    wrong = settings.model_copy(
        update={"models": (settings.models[0], ModelEntry(name="b", path=str(tmp_path / "no")))}
    )
    with pytest.raises(SettingsError, match="does not exist") as caught:
        with_models(wrong, NO_ENV, said.append)
    assert caught.value.param == "models.1.path"
    assert list(problems(LoadedSettings(wrong, {}))) == [f"models.1.path = {str(tmp_path / 'no')!r}: no such folder"]


def test_memory_is_shared_among_the_workers_that_name_no_size(settings: Settings, tmp_path: Path) -> None:
    big, small = served_models(with_resources(settings, tmp_path / "pools"))
    assert small.pool_bytes == 1 << 20
    assert big.pool_bytes > 1 << 20
    sized = settings.model_copy(update={"models": settings.models[1:]})
    assert with_resources(sized, tmp_path / "pools").kv.pool_bytes == 0


def test_the_door_knows_every_model_by_name_and_alias(settings: Settings) -> None:
    models = load_models(settings, NO_ENV)
    try:
        assert (models.names, models.pools) == (("big", "small"), ("big", "small"))
        big = models.get("gpt")
        assert (big.name, big.context, big.vocab_size) == ("big", 64, big.codec.tokenizer.vocab_size)
        assert (big.defaults.temperature, big.defaults.top_p, big.defaults.top_k) == (0.5, 0.75, 0)
        assert big.codec.tokenizer.eos_ids == (1, 2)
        assert_closed(models, "other", (), "models here: big, small")
        assert_closed(models, "gpt", ("small",), "models here: small")
        assert [model.name for model in models.open_to(("small",))] == ["small"]
        assert models.get("small", ("small",)).name == "small"
    finally:
        models.close()


def assert_closed(models: ServedModels, name: str, allowed: tuple[str, ...], words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        models.get(name, allowed)
    assert caught.value.code == "model_not_found"  # type: ignore[attr-defined]


def test_the_api_s_sampling_defaults_can_be_kept(folder: Path) -> None:
    settings = Settings(models=(ModelEntry(name="m", path=str(folder), generation_config="none"),))
    models = load_models(settings, NO_ENV)
    models.close()
    assert models.get("m").defaults.temperature == 1.0
