"""Pools of workers by request class: how settings state them, what they refuse, and what each process is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.config import problems
from services.cli.stack_models import with_models
from services.cli.topology import instance_names, process_settings
from shared.contracts.errors import SettingsError
from shared.engine.worker_settings import worker_options
from shared.settings.load import ROOT, as_environment, load_settings
from shared.settings.models import served_models
from shared.settings.request_classes import classes_conflict, classes_of
from shared.settings.sections import Settings


def settings_of(**flags: Any) -> Settings:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return load_settings({"workers.fake": "true", **named}, {}, None).settings


def taken(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Name of each worker to the classes that its beats will name; as a process reads its environment."""
    told = {}
    for name, service in instance_names(settings).items():
        if service in ("prefill", "decode"):
            own = load_settings(env=as_environment(process_settings(settings, name))).settings
            told[name] = worker_options(own, service, {}).classes
    return told


def test_every_worker_takes_all_unless_something_is_said() -> None:
    assert taken(settings_of(workers__decode="2")) == {"prefill-1": (), "decode-1": (), "decode-2": ()}


def test_each_worker_of_a_stack_has_an_entry_and_those_behind_take_all() -> None:
    settings = settings_of(
        workers__decode="3", workers__decode_classes="interactive, batch+analysis", workers__prefill_classes="batch"
    )
    assert taken(settings) == {
        "prefill-1": ("batch",),
        "decode-1": ("interactive",),
        "decode-2": ("analysis", "batch"),
        "decode-3": (),
    }


def test_each_model_may_have_pools_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(
        """schema = 1
[workers]
decode_classes = "interactive"
decode = 2
[[models]]
name = "a"
[[models]]
name = "b"
decode_classes = "batch, interactive+analysis"
"""
    )
    told = taken(load_settings({}, {}, file).settings)
    assert told["decode-a-1"] == ("interactive",)
    assert told["decode-a-2"] == ()
    assert (told["decode-b-1"], told["decode-b-2"]) == (("batch",), ("interactive", "analysis"))


@pytest.mark.parametrize(
    ("given", "classes"),
    [
        ("", ()),
        ("batch", ("batch",)),
        (" batch , interactive", ("interactive", "batch")),
        ("batch,analysis,interactive", ()),
    ],
)
def test_what_one_worker_takes(given: str, classes: tuple[str, ...]) -> None:
    assert classes_of(given) == classes


@pytest.mark.parametrize("field", ["engine.classes", "workers.decode_classes", "workers.prefill_classes"])
@pytest.mark.parametrize("value", ["urgent", "interactive,", "interactive;batch", "Interactive", "interactive batch"])
def test_a_class_that_nobody_knows_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(SettingsError, match=field) as caught:
        load_settings({field: value}, {}, None)
    assert caught.value.param == field


def test_one_worker_names_no_several_pools() -> None:
    with pytest.raises(SettingsError, match=r"engine\.classes"):
        load_settings({"engine.classes": "interactive+batch"}, {}, None)


@pytest.mark.parametrize(
    ("flags", "words", "key"),
    [
        ({"workers__decode_classes": "interactive"}, "leaves no decode worker to analysis and batch", "decode"),
        ({"workers__decode_classes": "interactive, batch"}, "has 2 entries for 1 decode workers", "decode"),
        ({"workers__prefill_classes": "batch, batch"}, "has 2 entries for 1 prefill workers", "prefill"),
        ({"engine__classes": "batch"}, "leaves no decode worker to interactive and analysis", "decode"),
    ],
    ids=["nobody for a class", "too many", "too many prefill", "all alike"],
)
def test_a_stack_that_could_not_serve_every_class_is_refused(
    flags: dict[str, str], words: str, key: str, tmp_path: Path
) -> None:
    loaded = load_settings(
        {"workers.fake": "true"} | {n.replace("__", "."): v for n, v in flags.items()}, {}, ROOT / "baton.toml"
    )
    assert [p for p in problems(loaded) if f"workers.{key}_classes" in p and words in p]
    with pytest.raises(SettingsError, match=words) as caught:
        with_models(loaded.settings, {}, lambda line: None)
    assert caught.value.param == f"workers.{key}_classes"


def test_the_rest_may_be_left_to_the_workers_behind() -> None:
    settings = settings_of(workers__decode="2", workers__decode_classes="interactive", engine__classes="analysis,batch")
    assert taken(settings)["decode-2"] == ("analysis", "batch")
    (model,) = served_models(settings)
    assert classes_conflict(model, "decode", settings.engine.classes) == ""
