"""How a model is sampled when a client names nothing: the defaults in its `generation_config.json`. Without torch.

The rule is vLLM's (`--generation-config auto`): a value that stands there replaces the API's default, and `do_sample`
is not looked at. A client's own value always wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.model.config import GENERATION
from shared.model.fields import Fields, read_fields

NEUTRAL: dict[str, tuple[float | int | None, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
}
"""What else there changes the tokens that come out, with the values that mean nothing."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling when a client names none; the fields' own defaults are the API's.

    Attributes:
        unused: fields of the file that are not applied, as `name = value`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    unused: tuple[str, ...] = ()


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of a model folder.

    Raises:
        SettingsError: the file is malformed, or a value is out of range; names file and field.
    """
    path = folder / GENERATION
    if not path.exists():
        return SamplingDefaults()
    fields = read_fields(path)
    unused = (
        f"{name} = {fields.raw[name]!r}"
        for name, neutral in NEUTRAL.items()
        if fields.raw.get(name) is not None and fields.raw[name] not in neutral
    )
    return SamplingDefaults(
        temperature=_number(fields, "temperature", 1.0, 2.0),
        top_p=_number(fields, "top_p", 1.0, 1.0, least=1e-9),
        top_k=_top_k(fields),
        min_p=_number(fields, "min_p", 0.0, 1.0),
        repetition_penalty=_number(fields, "repetition_penalty", 1.0, 10.0, least=1e-9),
        unused=tuple(unused),
    )


def _number(fields: Fields, name: str, default: float, most: float, least: float = 0.0) -> float:
    value = fields.raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise fields.error(name, f"{value!r} is not a number from {least:g} to {most:g}")
    return float(value)


def _top_k(fields: Fields) -> int:
    value = fields.raw.get("top_k")
    if value is None or value == -1:  # -1 means all, as 0 does
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise fields.error("top_k", f"{value!r} is not a whole number from 0")
    return value
