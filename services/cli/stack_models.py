"""The models of a stack before it starts: their folders found and looked at, cores and memory shared among workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from services.cli import cores
from shared.contracts.errors import SettingsError
from shared.model.fetch import cache_dir, fetch_default_model
from shared.model.folder import check_model_folder
from shared.model.gguf_folder import model_folder
from shared.settings.models import num_workers, served_models
from shared.settings.request_classes import classes_conflict
from shared.settings.sections import Settings


def with_models(settings: Settings, env: Mapping[str, str], say: Callable[[str], None]) -> Settings:
    """Settings with the folder of every model filled in; fetched once where it is the default model.

    Raises:
        SettingsError: a folder is missing, or holds a model that cannot be served; names file and tensor. Or a class of
            requests has no decode worker, or more workers are named than there are.
    """
    for number, model in enumerate(served_models(settings)):
        for role in ("prefill", "decode"):
            if conflict := classes_conflict(model, role, settings.engine.classes):
                field = f"{role}_classes"
                own = bool(settings.models) and getattr(settings.models[number], field) is not None
                param = f"models.{number}.{field}" if own else f"workers.{field}"
                raise SettingsError(f"{param} of model {model.name} {conflict}", param=param)
    fake = settings.workers.fake
    if not settings.models:
        path = _folder(settings.model.path, "model.path", settings.engine.quant, fake, env, say)
        return settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(path)})})
    entries = []
    for number, entry in enumerate(settings.models):
        quant = entry.quant or settings.engine.quant
        path = _folder(entry.path, f"models.{number}.path", quant, fake, env, say)
        entries.append(entry.model_copy(update={"path": str(path)}))
    return settings.model_copy(update={"models": tuple(entries)})


def _folder(given: str, param: str, quant: str, fake: bool, env: Mapping[str, str], say: Callable[[str], None]) -> Path:
    if not given:
        return fetch_default_model(cache_dir(env), say)
    path = model_folder(Path(given).expanduser().absolute(), cache_dir(env), say)
    if not path.is_dir():
        raise SettingsError(f"model folder {path} does not exist", param=param)
    check_model_folder(path, weights=not fake, quant=quant)
    return path


def with_resources(settings: Settings, pool_folder: Path) -> Settings:
    """Settings with memory shared among the workers of all models.

    Args:
        pool_folder: where pool files go unless `kv.dir` says otherwise; made here.
    """
    workers = num_workers(settings)
    folder = Path(settings.kv.dir).expanduser() if settings.kv.dir else pool_folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kv, engine = settings.kv.model_copy(update={"dir": str(folder)}), settings.engine
    # on a GPU each worker measures what is left of its memory
    on_gpu = engine.device != "cpu" and cores.has_gpu()
    if not on_gpu and not all(entry.pool_bytes for entry in served_models(settings)):
        free = cores.pool_bytes_per_worker(cores.free_memory_bytes(), cores.free_folder_bytes(folder), workers)
        kv = kv.model_copy(update={"pool_bytes": free})
    return settings.model_copy(update={"kv": kv})
