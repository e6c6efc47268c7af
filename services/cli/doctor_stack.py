"""The part of `./baton doctor` that needs the environment: settings, servers, model, state folder, running stack."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import httpx

from kernels.native.build import SHIPPED, find_shipped, source_digest
from kernels.native.compiler import ZIG_SIZE, find_compiler, missing_compiler
from kernels.native.cpu import NEEDED, VARIABLE, machine_level, machine_levels
from services.cli import config, servers
from services.cli.cores import has_gpu
from services.cli.doctor import FAIL, OK, SKIP, WARN, Finding, port_free
from services.cli.doctor_transfer import transfer
from services.cli.state import StackRecord, StateFolder, running_stack, state_path
from shared.contracts.errors import SettingsError
from shared.kv.layout import FLOAT16, FP8, KV_SETTINGS
from shared.model.config import packed_as
from shared.model.digest import model_digest
from shared.model.fetch import cache_dir, default_model_dir, is_complete
from shared.model.folder import check_model_folder
from shared.model.gguf_folder import folder_of, is_gguf
from shared.model.quality_gate import AUTO, SAME, Configuration, open_gate
from shared.settings.load import read_settings, settings_file
from shared.settings.models import served_models
from shared.settings.sections import GPU_ONLY, ModelEntry, Settings

TIMEOUT_S = 5.0


def examine_stack(env: Mapping[str, str], chosen: str | None) -> Iterator[Finding]:
    """Checks in the order `./baton up` needs what they look at."""
    try:
        path = settings_file(env, chosen)
    except SettingsError as exc:
        yield Finding("settings", FAIL, exc.message, "name one that exists, by --config or BATON_CONFIG")
        return
    loaded, faults = read_settings(env=env, file=path)
    settings = loaded.settings
    for fault in faults:
        yield Finding("settings", FAIL, fault.message, "correct it; ./baton config schema tells what is allowed")
    if faults:
        return
    wrong = list(config.problems(loaded))
    for line in wrong:
        yield Finding("settings", FAIL, line, "correct it; ./baton config show tells where each value came from")
    if not wrong:
        yield Finding("settings", OK, str(path or "defaults"))
    yield server("nats-server", settings.bus.nats_url, "NATS_URL", servers.nats_binary)
    yield server("redis", settings.store.redis_url, "REDIS_URL", servers.valkey_binary)
    yield kernels(settings, env)
    for entry in served_models(settings):
        yield model(entry, settings.workers.fake, env)
        yield quality(entry, settings, env)
    stack = running_stack(env)
    yield state(state_path(env))
    yield port(settings, stack)
    yield transfer(settings.kv, datetime.now(UTC))
    yield running(stack)
    if (left := leftover_pools(Path("/dev/shm"))) is not None:
        yield left


def kernels(settings: Settings, env: Mapping[str, str]) -> Finding:
    """Whether the native kernels can be had, which are several times as fast as torch's."""
    if settings.workers.fake or settings.engine.kernels not in ("auto", "native"):
        return Finding("kernels", SKIP, "fake workers" if settings.workers.fake else settings.engine.kernels)
    on_gpu = settings.engine.device != "cpu" and has_gpu()
    if settings.kv.dtype == "fp8" and not on_gpu:
        return Finding("kernels", FAIL, "kv.dtype 'fp8' needs a GPU", "set kv.dtype to int8 or auto")
    if settings.kv.dtype == FLOAT16 and on_gpu:
        return Finding("kernels", FAIL, "kv.dtype 'float16' is for CPUs", "set kv.dtype to int8, fp8 or auto")
    if not on_gpu and (wanted := next((q for e in served_models(settings) if (q := e.quant) in GPU_ONLY), None)):
        return Finding("kernels", FAIL, f"quant {wanted!r} needs a GPU", "set quant to int8 or none")
    needed = not on_gpu and any(entry.quant != "none" for entry in served_models(settings))
    bad = FAIL if needed or (settings.kv.dtype == "int8" and not on_gpu) else WARN
    instead = "none needed: torch computes instead, more slowly"
    if bad == FAIL:
        instead = "quant needs them: set it to none" if needed else "kv.dtype needs them: set it to auto"
    try:
        level = machine_level(env)
    except ValueError as exc:
        return Finding("kernels", bad, str(exc), f"unset {VARIABLE}")
    if level is None:
        return Finding("kernels", bad, NEEDED, instead)
    if env.get(SHIPPED) and (found := find_shipped(Path(env[SHIPPED]), machine_levels(env))):
        return Finding("kernels", OK, f"native, {found.level}, shipped in {found.path.parent}")
    kept = cache_dir(env) / "kernels"
    if compiler := find_compiler(env, kept):
        return Finding("kernels", OK, f"native, {level.name}, by {compiler.version}")
    if any(kept.glob(f"{source_digest()}-{level.name}-*.so")):
        return Finding("kernels", OK, f"native, {level.name}, kept in {kept}")
    if env.get("CC"):
        return Finding("kernels", bad, missing_compiler(env), "unset CC, or name one that is there")
    return Finding("kernels", WARN, "no C compiler", f"none needed: ./baton up fetches zig ({ZIG_SIZE})")


def server(name: str, url: str, variable: str, binary: Callable[[], Path]) -> Finding:
    """A server of somebody else's by its address, or a program of ours that starts."""
    if url:
        return Finding(name, OK, f"{config.masked(url)} is used ({variable}); not started by ./baton up")
    try:
        path = binary()
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except SettingsError as exc:
        return Finding(name, FAIL, exc.message, "rm -rf .venv, then ./baton up makes it anew")
    except (OSError, subprocess.SubprocessError) as exc:
        return Finding(name, FAIL, f"{path} does not start: {exc}", f"set {variable} to a running server")
    return Finding(name, OK, done.stdout.strip().splitlines()[0])


def model(entry: ModelEntry, fake: bool, env: Mapping[str, str]) -> Finding:
    """Is a model there, and one that can be served? Fake workers need no weights."""
    if entry.path:
        folder = Path(entry.path).expanduser()
        made = folder_of(folder, cache_dir(env))
        if is_gguf(folder) and folder.is_file() and not made.is_dir():
            return Finding("model", OK, f"{entry.name}, {folder}: ./baton up reads it")
        try:
            check_model_folder(made if made.is_dir() else folder, weights=not fake, quant=entry.quant or "none")
        except SettingsError as exc:
            fix = f"point the path of {entry.name} at a folder with a checkpoint"
            return Finding("model", FAIL, exc.message, "set quant to none" if exc.param == "quant" else fix)
        return Finding("model", OK, f"{entry.name}, {folder}")
    folder = default_model_dir(cache_dir(env))
    if is_complete(folder):
        return Finding("model", OK, f"the default, {folder}")
    return Finding("model", WARN, "the default model is not fetched yet (92 MB)", "none needed: ./baton up fetches it")


def quality(entry: ModelEntry, settings: Settings, env: Mapping[str, str]) -> Finding:
    """Which number format would compute a model, and what is known of its quality."""
    folder = Path(entry.path).expanduser() if entry.path else default_model_dir(cache_dir(env))
    if is_gguf(folder):
        folder = folder_of(folder, cache_dir(env))
    if settings.workers.fake:
        return Finding("quality", SKIP, "fake workers")
    try:
        digest, gate = model_digest(folder), open_gate(cache_dir(env))
    except SettingsError:
        return Finding("quality", SKIP, f"looked at once the model {entry.name} is there")
    kv = FLOAT16 if settings.kv.dtype == FLOAT16 else KV_SETTINGS.get(settings.kv.dtype, SAME)
    native = kernels(settings, env).verdict == OK or entry.quant != "none" or kv not in (SAME, FLOAT16)
    family = "triton" if settings.engine.device != "cpu" and has_gpu() else "native" if native else "torch"
    own = packed_as(folder) if family != "torch" else ""
    dtype = gate.default_dtype(digest, family, own or "none") if entry.dtype == AUTO else entry.dtype
    configuration = Configuration(family, dtype, own or entry.quant or "none", kv)
    if kv == FP8 and family != "triton":
        return Finding("quality", SKIP, "kv.dtype 'fp8' needs a GPU")
    if entry.quant in GPU_ONLY and family != "triton":
        return Finding("quality", SKIP, f"quant {entry.quant!r} needs a GPU")
    if kv == FLOAT16 and family == "triton":
        return Finding("quality", SKIP, "kv.dtype 'float16' is for CPUs")
    line = gate.describe(digest, configuration)
    if gate.allows(digest, configuration):
        return Finding("quality", OK, line)
    unmeasured = gate.record(digest, configuration) is None
    flags = f"--kernels {family} --dtype {dtype} --quant {'none' if own else configuration.quant}"
    if kv != SAME:
        flags += f" --kv {settings.kv.dtype}"
    where = f"--model {folder} " if entry.path else ""
    measure = f"./baton bench quality {where}{flags} measures it" if unmeasured else ""
    return Finding("quality", WARN, line, measure or "leave dtypes at auto and quant at none for what passed")


def state(path: Path) -> Finding:
    """Can the state folder be used, and by us alone?"""
    if not path.exists():
        above = next(folder for folder in path.parents if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            text = f"{path} cannot be made: {above} is not a folder we may write to"
            return Finding("state folder", FAIL, text, "set BATON_STATE to a folder of your own")
        return Finding("state folder", OK, f"{path} will be made")
    try:
        StateFolder(path)
    except SettingsError as exc:
        return Finding("state folder", FAIL, exc.message, "set BATON_STATE to a folder of your own")
    return Finding("state folder", OK, str(path))


def port(settings: Settings, stack: StackRecord | None) -> Finding:
    """Can the gateway listen? While our own stack does, it cannot, and need not."""
    host, number = settings.gateway.host, settings.gateway.port
    if number == 0:
        return Finding("port", OK, "a free one is taken")
    if reason := port_free(host, number):
        if stack is not None and stack.url.endswith(f":{number}"):
            return Finding("port", OK, f"{host}:{number}, held by the running stack")
        return Finding("port", FAIL, f"{host}:{number}: {reason}", "./baton up --port 0 takes a free one")
    return Finding("port", OK, f"{host}:{number} is free")


def running(stack: StackRecord | None) -> Finding:
    """If a stack runs: does it serve?"""
    if stack is None:
        return Finding("stack", SKIP, "none is running")
    try:
        answer = httpx.get(f"{stack.url}/ready", timeout=TIMEOUT_S)
        checks = answer.json()["checks"]
    except (httpx.HTTPError, ValueError, KeyError) as exc:
        return Finding("stack", FAIL, f"{stack.url} does not answer: {exc}", "./baton logs gateway; ./baton down")
    if answer.status_code == 200:
        return Finding("stack", OK, f"{stack.url} is ready")
    lacking = ", ".join(name for name, good in checks.items() if not good)
    return Finding("stack", FAIL, f"{stack.url} is not ready: {lacking}", f"./baton logs {lacking.partition(',')[0]}")


def leftover_pools(shm: Path) -> Finding | None:
    """KV pool files nobody holds: a worker that was killed leaves one, the next start removes it."""
    left = [path for path in shm.glob("baton-*/*.kvpool") if path.is_file() and _unlocked(path)]
    if not left:
        return None
    folders = ", ".join(sorted({str(path.parent) for path in left}))
    text = f"{len(left)} pool file(s) nobody holds, {sum(p.stat().st_size for p in left) / 2**20:.0f} MiB: {folders}"
    return Finding("leftovers", WARN, text, "./baton down with the same BATON_STATE removes them, or delete the folder")


def _unlocked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
