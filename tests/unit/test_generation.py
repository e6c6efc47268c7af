from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.errors import SettingsError
from shared.model.generation import SamplingDefaults, load_sampling_defaults


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_a_model_without_defaults_has_the_apis(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()
    assert load_sampling_defaults(write(tmp_path, eos_token_id=[1, 2], do_sample=False)) == SamplingDefaults()
    assert load_sampling_defaults(write(tmp_path, temperature=None, top_p=None, top_k=-1)) == SamplingDefaults()


def test_what_the_file_says(tmp_path: Path) -> None:
    found = load_sampling_defaults(
        write(
            tmp_path, temperature=0, top_p=0.8, top_k=20, repetition_penalty=1.05, num_beams=1, min_p=0.1, typical_p=0.5
        )
    )
    assert found == SamplingDefaults(0.0, 0.8, 20, 0.1, 1.05, ("typical_p = 0.5",))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.5},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": True},
        {"top_k": 1.5},
        {"top_k": -2},
        {"min_p": 1.1},
    ]
    + [{"repetition_penalty": value} for value in (0, -1, 10.5, "x", True)],
)
def test_values_out_of_range_are_refused_by_file_and_field(tmp_path: Path, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(SettingsError, match=rf"generation_config\.json: {name}: "):
        load_sampling_defaults(write(tmp_path, **fields))
