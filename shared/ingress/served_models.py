"""The models an ingress serves: each by its name with a tokenizer, a context and the pool of workers that runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.ingress.error_body import unknown_model
from shared.ingress.prompt_codec import Parsed, PromptCodec
from shared.model.config import load_config
from shared.model.fetch import cache_dir, default_model_dir
from shared.model.generation import SamplingDefaults, load_sampling_defaults
from shared.settings.models import served_models
from shared.settings.sections import ModelEntry, Settings
from shared.text.tokenizer import load_tokenizer

log = logging.getLogger("baton.ingress")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model.

    Attributes:
        pool: part of the scheduler's subjects.
        context: most tokens of prompt and output together.
        aliases: other names clients may ask for; everything behind the door goes by `name`.
        defaults: sampling when a client names none.
        embeddings: tokens the model knows; 0 = as many as its tokenizer.
    """

    name: str
    pool: str
    context: int
    codec: PromptCodec
    aliases: tuple[str, ...] = ()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    embeddings: int = 0

    @property
    def vocab_size(self) -> int:
        """Ids below it may stand in a prompt."""
        known = self.codec.tokenizer.vocab_size
        return min(known, self.embeddings) if self.embeddings else known


class ServedModels:
    """Models by name, in the order given; the first one is the default of probes."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self._aliases = {alias: model for model in self for alias in model.aliases}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may ask for, aliases aside."""
        return tuple(self._models)

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool once."""
        return tuple(dict.fromkeys(model.pool for model in self))

    def open_to(self, allowed: Sequence[str]) -> list[ServedModel]:
        """The models whose names are in `allowed`; empty allows every one."""
        return [model for model in self if not allowed or model.name in allowed]

    def get(self, name: str, allowed: Sequence[str] = ()) -> ServedModel:
        """The model of a name or alias, if it is open to `allowed`. Raises UnknownModel naming those that are."""
        model = self._models.get(name) or self._aliases.get(name)
        found = self.open_to(allowed)
        if model is None or model not in found:
            raise unknown_model([model.name for model in found])
        return model

    async def parse(self, parse: Callable[[bytes], Parsed], body: bytes) -> Parsed:
        """`parse(body)`, which finds out the model: the first one's threads do it. Raises what it raises."""
        return await next(iter(self)).codec.parse(parse, body)

    def close(self) -> None:
        """End the codecs' threads."""
        for model in self:
            model.codec.close()


def load_models(settings: Settings, env: Mapping[str, str]) -> ServedModels:
    """The models of the settings, with their tokenizers. Raises SettingsError for a folder that lacks something."""
    return ServedModels([_load(entry, env) for entry in served_models(settings)])


def _load(entry: ModelEntry, env: Mapping[str, str]) -> ServedModel:
    folder = Path(entry.path) if entry.path else default_model_dir(cache_dir(env))
    config = load_config(folder)
    defaults = load_sampling_defaults(folder) if entry.generation_config == "auto" else SamplingDefaults()
    if defaults.unused:
        log.warning("%s: of generation_config.json not applied: %s", entry.name, ", ".join(defaults.unused))
    return ServedModel(
        name=entry.name,
        pool=entry.pool,
        context=config.max_positions,
        codec=PromptCodec(load_tokenizer(folder), config.max_positions, tools=entry.tools, reasoning=entry.reasoning),
        aliases=entry.aliases,
        defaults=defaults,
        embeddings=config.vocab_size,
    )
