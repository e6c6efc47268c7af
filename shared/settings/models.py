"""Which models are served: the `[[models]]` tables, or the one of `[model]`, `[workers]` and `[kv]`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from shared.contracts.errors import SettingsError
from shared.settings.sections import GPU_ONLY, ModelEntry, Settings

MAX_POOL_CHARS = 40
_SHORT_FORM = ("name", "path", "dtype", "pool", "generation_config", "tools", "reasoning")
"""Fields of `[[models]]` that `[model]` has too."""


def served_models(settings: Settings) -> tuple[ModelEntry, ...]:
    """Every model with nothing left open but its folder and its memory, in the order given."""
    model, workers = settings.model, settings.workers
    entries = settings.models or (
        ModelEntry(
            name=model.name,
            path=model.path,
            dtype=model.dtype,
            pool=model.pool,
            generation_config=model.generation_config,
            tools=model.tools,
            reasoning=model.reasoning,
        ),
    )
    return tuple(
        entry.model_copy(
            update={
                "pool": entry.pool or pool_name(entry.name),
                "prefill": workers.prefill if entry.prefill is None else entry.prefill,
                "decode": workers.decode if entry.decode is None else entry.decode,
                "prefill_classes": _given(entry.prefill_classes, workers.prefill_classes),
                "decode_classes": _given(entry.decode_classes, workers.decode_classes),
                "pool_bytes": entry.pool_bytes or settings.kv.pool_bytes,
                "quant": entry.quant or settings.engine.quant,
            }
        )
        for entry in entries
    )


def _given(own: str | None, general: str) -> str:
    return general if own is None else own


def num_workers(settings: Settings) -> int:
    """Workers of all models together."""
    return sum((entry.prefill or 0) + (entry.decode or 0) for entry in served_models(settings))


def for_model(settings: Settings, entry: ModelEntry) -> Settings:
    """The settings of a process that serves one model's pool: in the short form, whichever form they had."""
    model = settings.model.model_copy(update={name: getattr(entry, name) for name in _SHORT_FORM})
    names = ("prefill", "decode", "prefill_classes", "decode_classes")
    workers = settings.workers.model_copy(update={name: getattr(entry, name) for name in names})
    kv = settings.kv.model_copy(update={"pool_bytes": entry.pool_bytes})
    engine = settings.engine.model_copy(update={"quant": entry.quant or settings.engine.quant})
    return settings.model_copy(update={"models": (), "model": model, "workers": workers, "kv": kv, "engine": engine})


def quant_conflict(settings: Settings, model: ModelEntry) -> str:
    """Why the weights of one of `served_models` cannot be integers with these settings; "" for no reason."""
    if model.quant in GPU_ONLY:
        return _gpu_conflict(settings)
    return "" if model.quant in (None, "none") else _integers_conflict(settings)


def kv_conflict(settings: Settings) -> str:
    """Why KV cannot be kept in that dtype with these settings; "" for no reason."""
    engine = settings.engine
    if settings.kv.dtype == "fp8":
        return _gpu_conflict(settings)
    if settings.kv.dtype == "float16" and not settings.workers.fake:
        if engine.kernels == "triton":
            return "is for CPUs, not engine.kernels = 'triton'"
        return "is for CPUs, not engine.device = 'cuda'" if engine.device == "cuda" else ""
    return _integers_conflict(settings) if settings.kv.dtype == "int8" else ""


def _gpu_conflict(settings: Settings) -> str:
    engine = settings.engine
    if settings.workers.fake:
        return ""
    if engine.kernels not in ("auto", "triton"):
        return f"needs a GPU, not engine.kernels = {engine.kernels!r}"
    return "needs a GPU, not engine.device = 'cpu'" if engine.device == "cpu" else ""


def _integers_conflict(settings: Settings) -> str:
    if settings.workers.fake or settings.engine.kernels != "torch":
        return ""
    return "needs the native kernels or a GPU, not engine.kernels = 'torch'"


def only_model(settings: Settings) -> ModelEntry:
    """The model of a process that serves one pool. Raises SettingsError when there are several."""
    entries = served_models(settings)
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise SettingsError(
            f"this process serves one of the models {names}; tell it which by BATON_MODELS=[] and BATON_MODEL_NAME, "
            "BATON_MODEL_PATH, BATON_MODEL_DTYPE and BATON_MODEL_POOL",
            param="models",
        )
    return entries[0]


def pool_name(model: str) -> str:
    """A model's name as the name of a pool, which is part of subjects: `Qwen/Qwen2.5-0.5B` → `qwen-qwen2-5-0-5b`."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:MAX_POOL_CHARS].strip("-") or "model"


def parse_models(tables: object, place: Callable[[str], str], faults: list[SettingsError]) -> tuple[ModelEntry, ...]:
    """The entries of `[[models]]`; without those that are wrong.

    Args:
        tables: parsed TOML or JSON.
        place: where `models`, `models.0` or `models.0.name` stands, for errors.
        faults: takes what is wrong: not tables, an unknown field, a wrong value, a name or pool that two of them have.
    """
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        faults.append(SettingsError(f"{place('models')}: models must be [[models]] tables", param="models"))
        return ()
    found = {number: _entry(table, f"models.{number}", place, faults) for number, table in enumerate(tables)}
    entries = {number: entry for number, entry in found.items() if entry is not None}
    names = {number: (entry.name, *entry.aliases) for number, entry in entries.items()}
    faults += _not_distinct(names, "name", "names", place)
    if any(fault.param.endswith(".name") for fault in faults):
        return tuple(entries.values())  # their pools would be the same for the same reason
    pools = {number: (entry.pool or pool_name(entry.name),) for number, entry in entries.items()}
    faults += _not_distinct(pools, "pool", "pools", place)
    return tuple(entries.values())


def reason(message: str) -> str:
    """What pydantic says of a value, as the end of a sentence. Pure."""
    message = message.partition(", unable to")[0]
    return message[:1].lower() + message[1:]


def _entry(
    table: Mapping[str, Any], name: str, place: Callable[[str], str], faults: list[SettingsError]
) -> ModelEntry | None:
    fields = ModelEntry.model_fields
    known = f"known are {', '.join(fields)}"
    before = len(faults)
    faults += [
        SettingsError(
            f"{place(f'{name}.{field}')}: unknown field {field!r} in [[models]]; {known}", param=f"{name}.{field}"
        )
        for field in table
        if field not in fields
    ]
    values = {
        field: tuple(value) if isinstance(value, list) else value for field, value in table.items() if field in fields
    }
    try:
        entry = ModelEntry.model_validate(values, strict=True)
    except ValidationError as exc:
        for fault in exc.errors():
            field = str(fault["loc"][0])
            given, where = (f" = {table[field]!r}", f"{name}.{field}") if field in table else ("", name)
            message = f"{place(where)}: {name}.{field}{given}: {reason(fault['msg'])}"
            faults.append(SettingsError(message, param=where))
        return None
    return entry if len(faults) == before else None


def _not_distinct(
    groups: Mapping[int, Sequence[str]], field: str, what: str, place: Callable[[str], str]
) -> list[SettingsError]:
    seen: dict[str, int] = {}
    faults = []
    for number, group in groups.items():
        for value in group:
            if value in seen:
                other = place(f"models.{seen[value]}")
                message = f"{place(f'models.{number}')}: {what} must differ: {value!r} is also in {other}"
                faults.append(SettingsError(message, param=f"models.{number}.{field}"))
            seen.setdefault(value, number)
    return faults
