"""The models an ingress serves: each by its name with a tokenizer, a context and the pool of workers that runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.ingress.error_body import unknown_model
from shared.ingress.prompt_codec import PromptCodec, Request
from shared.model.fetch import cache_dir, default_model_dir
from shared.settings.sections import Settings
from shared.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. `context`: most tokens of prompt and output together; `pool`: part of the scheduler's subjects."""

    name: str
    pool: str
    context: int
    codec: PromptCodec


class ServedModels:
    """Models by name, in the order given; the first one is the default of probes."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may ask for."""
        return tuple(self._models)

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool once."""
        return tuple(dict.fromkeys(model.pool for model in self))

    def get(self, name: str) -> ServedModel:
        """Raises UnknownModel naming the known ones."""
        if name not in self._models:
            raise unknown_model(self.names)
        return self._models[name]

    async def parse(self, parse: Callable[[bytes], Request], body: bytes) -> Request:
        """`parse(body)`, which finds out the model: the first one's threads do it. Raises what it raises."""
        return await next(iter(self)).codec.parse(parse, body)

    def close(self) -> None:
        """End the codecs' threads."""
        for model in self:
            model.codec.close()


def load_models(settings: Settings, env: Mapping[str, str]) -> ServedModels:
    """The models of the settings, with their tokenizers. Raises SettingsError for a folder that lacks something."""
    section = settings.model
    folder = Path(section.path) if section.path else default_model_dir(cache_dir(env))
    context = context_length(folder)
    codec = PromptCodec(load_tokenizer(folder), context)
    return ServedModels([ServedModel(section.name, section.pool, context, codec)])


def context_length(model_dir: Path) -> int:
    """`max_position_embeddings` of a model folder. Raises SettingsError when it is not there."""
    path = model_dir / "config.json"
    try:
        value = json.loads(path.read_bytes())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SettingsError(f"{path}: no max_position_embeddings", param=str(path)) from exc
    if type(value) is not int or value < 2:
        raise SettingsError(f"{path}: max_position_embeddings must be an integer above 1", param=str(path))
    return value
