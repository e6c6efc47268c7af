"""Building, keeping and refusing the native library. Compilers are scripts that hand out a library built before."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kernels.dispatch import choose
from kernels.native import abi, cpu, trial
from kernels.native import compiler as native_compiler
from kernels.native.build import Built, compile_library, ensure_library
from kernels.native.compiler import Compiler, NativeUnavailable, NoCompiler, find_compiler
from kernels.native.cpu import LEVELS, NEEDED, VARIABLE, best_level, machine_level, parse_flags
from kernels.native.library import open_library
from services.cli.native_kernels import prepare_kernels
from shared.model.decoder import load_decoder
from shared.model.fetch import cache_dir
from shared.settings.sections import EngineSettings, Settings, WorkersSettings
from tests.native import require_native
from tests.tiny_models import make_tiny_model

ALL_FLAGS = frozenset[str]().union(*(level.needs for level in LEVELS))


@pytest.mark.parametrize(
    ("machine", "without", "name"),
    [
        ("x86_64", set(), "avx512_bf16"),
        ("x86_64", {"avx512_bf16"}, "avx512_vnni"),
        ("x86_64", {"avx512_vnni"}, "avx512"),
        ("x86_64", {"avx512vl"}, "avx2"),
        ("x86_64", {"avx512vl", "f16c"}, None),
        ("x86_64", ALL_FLAGS, None),
        ("aarch64", set(), "neon_dotprod"),
        ("aarch64", {"asimddp"}, "neon"),
        ("aarch64", ALL_FLAGS, None),
        ("riscv64", set(), None),
    ],
)
def test_the_best_level_is_one_the_processor_has(machine: str, without: set[str], name: str | None) -> None:
    found = best_level(ALL_FLAGS - without, machine=machine)
    assert (found.name if found else None) == name


def test_a_level_is_forced_down_and_never_up() -> None:
    assert best_level(ALL_FLAGS, "avx512") is LEVELS[2]
    assert best_level(ALL_FLAGS, "none") is None
    assert best_level(ALL_FLAGS - {"avx512_bf16"}, "avx512_bf16") is LEVELS[1]
    with pytest.raises(ValueError, match="sse: known are none, avx512_bf16"):
        best_level(ALL_FLAGS, "sse")
    with pytest.raises(ValueError, match=r"avx2: known are none, neon_dotprod, neon$"):
        best_level(ALL_FLAGS, "avx2", "aarch64")


def test_only_flags_of_all_processors_count() -> None:
    text = "processor : 0\nflags\t\t: fpu avx512f fma\nvmx flags\t: x\nprocessor : 1\nflags\t\t: fpu fma\n"
    assert parse_flags(text) == {"fpu", "fma"}
    assert parse_flags("processor : 0\nFeatures : fp asimd\n") == {"fp", "asimd"}
    assert parse_flags("processor : 0\nmodel name : x\n") == frozenset()


@pytest.fixture(scope="module")
def built() -> Built:
    require_native()
    level = machine_level({})
    assert level is not None
    return ensure_library(cache_dir(os.environ) / "kernels", level, os.environ)


class FakeCompiler:
    """A compiler that notes its calls in a file and runs `body` with the target in `$out`."""

    def __init__(self, folder: Path, body: str) -> None:
        self.calls = folder / "calls"
        path = folder / "fake-cc"
        path.write_text(
            "#!/bin/sh\n"
            'for last; do :; done\n[ "$last" = --version ] && { echo "fake 1.0"; exit 0; }\n'
            f'echo call >> "{self.calls}"\n'
            'while [ "$1" != -o ]; do shift; done\nout="$2"\n' + body + "\n"
        )
        path.chmod(0o755)
        self.env = {**os.environ, "CC": str(path)}

    def count(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0


def level() -> cpu.Level:
    found = machine_level({})
    assert found is not None
    return found


def test_a_library_is_built_once(tmp_path: Path, built: Built) -> None:
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    folder = tmp_path / "kept"
    first = ensure_library(folder, level(), compiler.env)
    assert ensure_library(folder, level(), compiler.env) == first
    assert compiler.count() == 1
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so", ".sum"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_two_that_start_at_once_build_once(tmp_path: Path, built: Built) -> None:
    compiler = FakeCompiler(tmp_path, f'sleep 0.3; cp "{built.path}" "$out"')
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ensure_library(tmp_path / "kept", level(), compiler.env), range(4)))
    assert len(set(found)) == 1
    assert compiler.count() == 1


@pytest.mark.parametrize("harm", ["cut short", "one byte", "no sum", "empty"])
def test_a_library_that_is_not_what_was_built_is_built_again(tmp_path: Path, built: Built, harm: str) -> None:
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    found = ensure_library(tmp_path / "kept", level(), compiler.env)
    data = found.path.read_bytes()
    if harm == "no sum":
        found.path.with_suffix(".sum").unlink()
    else:
        damaged = {"cut short": data[:5000], "one byte": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[harm]
        found.path.write_bytes(damaged)
    assert ensure_library(tmp_path / "kept", level(), compiler.env) == found
    assert compiler.count() == 2
    assert found.path.read_bytes() == data


def test_without_a_compiler_a_kept_library_serves(
    tmp_path: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_compiler, "find_zig", lambda folder: None)
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    found = ensure_library(tmp_path / "kept", level(), compiler.env)
    bare = {"PATH": str(tmp_path / "nothing")}
    assert ensure_library(tmp_path / "kept", level(), bare) == found
    with pytest.raises(NoCompiler, match="no C compiler"):
        ensure_library(tmp_path / "other", level(), bare)
    with pytest.raises(NoCompiler, match=r"^CC=nothing-here -x is no C compiler that runs"):
        ensure_library(tmp_path / "other", level(), {**os.environ, "CC": "nothing-here -x"})


def test_the_compiler_may_have_arguments(tmp_path: Path, built: Built) -> None:
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    ccache = tmp_path / "ccache"
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    plain = ensure_library(tmp_path / "kept", level(), compiler.env)
    env = {**os.environ, "CC": f"'{ccache}' {compiler.env['CC']} -DMORE='a b'"}
    found = find_compiler(env)
    assert found is not None
    assert found.command == (str(ccache), compiler.env["CC"], "-DMORE=a b")
    assert found.version == "fake 1.0"
    assert ensure_library(tmp_path / "kept", level(), env).path != plain.path
    assert compiler.count() == 2
    assert find_compiler({**os.environ, "CC": "'unclosed"}) is None


def test_old_libraries_of_other_sources_go(tmp_path: Path, built: Built) -> None:
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    folder = tmp_path / "kept"
    current = ensure_library(folder, level(), compiler.env).path
    month = 31 * 86400
    for name in ("old-avx2-0.so", "old-avx2-0.sum", "young-avx2-0.so", "young-avx2-0.sum"):
        (folder / name).write_text(name)
        os.utime(folder / name, (time.time() - month * name.startswith("old"),) * 2)
    for name, age in ((".zig-killed", 3600.0), (".zig-being-fetched", 0.0)):
        (folder / name).mkdir()
        os.utime(folder / name, (time.time() - age,) * 2)
    (folder / ".build-killed").mkdir()
    (folder / ".build-killed" / "x.so").write_text("")
    os.utime(current, (time.time() - month,) * 2)
    again = ensure_library(folder, level(), {**compiler.env, "CC": f"{compiler.env['CC']} -DANOTHER"}).path
    left = {path.name for path in folder.iterdir()}
    pairs = {path.with_suffix(suffix).name for path in (current, again) for suffix in (".so", ".sum")}
    assert left == {"lock", "young-avx2-0.so", "young-avx2-0.sum", ".zig-being-fetched"} | pairs


def test_a_library_in_use_is_not_old(tmp_path: Path, built: Built) -> None:
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    path = ensure_library(tmp_path / "kept", level(), compiler.env).path
    os.utime(path, (0, 0))
    ensure_library(tmp_path / "kept", level(), compiler.env)
    assert time.time() - path.stat().st_mtime < 3600


# ---------------------------------------------------------------------------------------------------------------- zig


def wheel(home: Path, built: Built) -> None:
    """A `ziglang` wheel, unpacked, whose zig hands out a library built before."""
    zig = home / "ziglang" / "zig"
    zig.parent.mkdir(parents=True)
    zig.write_text(
        '#!/bin/sh\nfor last; do :; done\n[ "$last" = --version ] && { echo "clang of zig"; exit 0; }\n'
        '[ "$1" = cc ] || exit 1\n'
        f'while [ "$1" != -o ]; do shift; done\ncp "{built.path}" "$2"\n'
    )
    zig.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a machine without a compiler, whose Python has no `ziglang` either."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cp").symlink_to("/bin/cp")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(native_compiler.importlib.util, "find_spec", lambda name: None)
    return {"PATH": str(tools), "BATON_CACHE": str(tmp_path / "cache")}


def test_zig_is_fetched_where_there_is_no_compiler(tmp_path: Path, built: Built, bare: dict[str, str]) -> None:
    folder, said = tmp_path / "cache" / "kernels", list[str]()
    wanted = Settings(engine=EngineSettings(kernels="native"))

    def fetch(folder: Path) -> None:
        wheel(folder / f"zig-{native_compiler.ZIG}", built)

    assert prepare_kernels(wanted, bare, said.append, fetch) == f"native kernels for {built.level}"
    assert len(said) == 1
    assert said[0].startswith("no C compiler: fetching zig")
    found = find_compiler(bare, folder)
    assert found is not None
    assert found.version == "clang of zig"
    assert found.command[1:4] == ("cc", "-target", f"{os.uname().machine}-linux-gnu")
    # the second start finds the library, or builds it with the zig that is there
    assert prepare_kernels(wanted, bare, said.append, pytest.fail) == f"native kernels for {built.level}"
    assert len(said) == 1


def test_without_a_network_torch_computes(bare: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said = prepare_kernels(Settings(engine=EngineSettings(kernels="native")), bare)
    assert said.startswith("no C compiler, and zig cannot be fetched: ERROR: No matching distribution found")
    assert said.endswith("torch computes instead, more slowly")
    assert [path.name for path in Path(bare["BATON_CACHE"], "kernels").iterdir()] == ["lock"]


def test_a_compiler_that_was_named_is_not_replaced(bare: dict[str, str]) -> None:
    wanted = Settings(engine=EngineSettings(kernels="native"))
    said = prepare_kernels(wanted, {**bare, "CC": "icc"}, fetch=pytest.fail)
    assert said.startswith("CC=icc is no C compiler that runs")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_zig_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    if native_compiler.find_zig(None) is None:
        pytest.skip("no ziglang in this environment")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ensure_library(tmp_path / "kept", level(), {"PATH": str(tmp_path)}).level == level().name


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('echo "x.c:1:1: error: no room" >&2; exit 1', "cannot build the native kernels: x.c:1:1: error: no room"),
        ('echo "not a library" > "$out"', "failed its trial|failed their trial"),
        (
            r'printf "void baton_sizes(void) { __builtin_trap(); }" | REAL_CC -shared -fPIC -x c - -o "$out"',
            "signal",
        ),
        (r'printf "void baton_sizes(long *s) { s[0] = 1; }" | REAL_CC -shared -fPIC -x c - -o "$out"', "sizes"),
    ],
    ids=["fails", "makes rubbish", "makes what crashes", "makes another library"],
)
def test_a_library_that_does_not_work_is_refused_in_one_line(
    tmp_path: Path, built: Built, body: str, words: str
) -> None:
    real = find_compiler(os.environ)
    assert real is not None
    compiler = FakeCompiler(tmp_path, body.replace("REAL_CC", real.command[0]))
    with pytest.raises(NativeUnavailable, match=words) as caught:
        ensure_library(tmp_path / "kept", level(), compiler.env)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]


@pytest.mark.parametrize("form", [abi.FORMAT_INT8, abi.FORMAT_INT4])
def test_a_trial_looks_at_products_of_integers(
    built: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: int
) -> None:
    assert trial.main(built.path) == 0

    class Broken:
        """Leaves out the packing of one format."""

        def __init__(self, library: ctypes.CDLL) -> None:
            self._library = abi.declare(library)

        def __getattr__(self, name: str) -> Any:
            whole = getattr(self._library, name)
            return (lambda *a: 0 if a[-2] == form else whole(*a)) if name.startswith("baton_pack_integers") else whole

    monkeypatch.setattr(trial, "declare", Broken)
    assert trial.main(built.path) == 1
    assert f"bfloat16, format {form}: code 0, sums" in capsys.readouterr().err


def test_a_trial_looks_at_draws(
    built: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        """Draws nothing."""

        def __init__(self, library: ctypes.CDLL) -> None:
            self._library = abi.declare(library)

        def __getattr__(self, name: str) -> Any:
            return (lambda *a: 0) if name == "baton_sample" else getattr(self._library, name)

    monkeypatch.setattr(trial, "declare", Broken)
    assert trial.main(built.path) == 1
    assert "draws: code 0, tokens [0, 0, 0]" in capsys.readouterr().err


def test_a_folder_of_others_is_not_loaded_from(tmp_path: Path, built: Built) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="written by them"):
        ensure_library(folder, level(), os.environ)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, built: Built) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="cannot keep the native kernels"):
        ensure_library(tmp_path / "file" / "kept", level(), os.environ)


def test_a_full_disk_is_one_line(tmp_path: Path, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(NativeUnavailable, match="No space left"):
        ensure_library(tmp_path / "kept", level(), compiler.env)


@pytest.mark.parametrize("setting", ["auto", "native"])
def test_native_falls_back_with_one_warning(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    with caplog.at_level(logging.WARNING):
        choice = choose(setting, tmp_path / "kept")
    assert choice.native is None
    assert choice == choose("torch")
    assert [record.message for record in caplog.records] == [f"{NEEDED}; torch computes instead, more slowly"]
    assert not (tmp_path / "kept").exists()


def test_up_builds_what_its_workers_will_load(tmp_path: Path, built: Built) -> None:
    compiler = FakeCompiler(tmp_path, f'cp "{built.path}" "$out"')
    env = {**compiler.env, "BATON_CACHE": str(tmp_path / "cache")}
    wanted = Settings(engine=EngineSettings(kernels="native"))
    assert prepare_kernels(Settings(engine=EngineSettings(kernels="torch")), env) == ""
    assert prepare_kernels(wanted.model_copy(update={"workers": WorkersSettings(fake=True)}), env) == ""
    assert compiler.count() == 0
    assert prepare_kernels(wanted, env) == f"native kernels for {built.level}"
    assert open_library(tmp_path / "cache" / "kernels", env).id.startswith(
        ensure_library(tmp_path / "cache" / "kernels", level(), env).id
    )
    assert compiler.count() == 1
    assert prepare_kernels(Settings(engine=EngineSettings(device="cpu")), env) == f"native kernels for {built.level}"
    assert compiler.count() == 1
    assert prepare_kernels(wanted, {**env, VARIABLE: "none"}).endswith("torch computes instead, more slowly")


def test_a_forced_level_nobody_knows_is_named(tmp_path: Path) -> None:
    if machine_level({}) is None:
        pytest.skip(NEEDED)
    with pytest.raises(NativeUnavailable, match="BATON_CPU_LEVEL=sse"):
        open_library(tmp_path, {VARIABLE: "sse"})


def test_a_model_the_library_cannot_run_is_torch_s(
    tmp_path: Path, built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path, head_dim=18, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        model = load_decoder(folder, "bfloat16", "native")
    assert model.kernels.native is None
    assert len([record for record in caplog.records if "torch computes instead" in record.message]) == 1
    assert load_decoder(folder, "float64", "native").kernels.native is None


SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


def sanitized(compiler: Compiler) -> dict[str, str]:
    """The environment of a process that loads a library built with SANITIZERS."""
    command = [*compiler.command, "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("the native kernels cannot be built with sanitizers here")
    options = "detect_leaks=0:abort_on_error=1"
    return {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "BATON_TEST_GUARD": "0"}


@pytest.mark.timeout(600)
def test_no_sanitizer_finds_anything_in_any_operation(tmp_path: Path) -> None:
    """The best level, compiled without optimization, which takes a tenth of the time."""
    require_native()
    real = find_compiler(os.environ)
    assert real is not None
    slow = tmp_path / "slow-cc"
    command = shlex.join((*real.command, *SANITIZERS, "-O0"))
    slow.write_text(f'#!/bin/sh\nfor a; do shift; [ "$a" = -O3 ] || set -- "$@" "$a"; done\nexec {command} "$@"\n')
    slow.chmod(0o755)
    env = {**sanitized(real), "CC": str(slow), "BATON_CACHE": str(tmp_path / "cache")}
    files = ["tests/unit/test_native_levels.py", "tests/unit/test_native_sampling.py"]
    wanted = f"(right or reference or edge) and {level().name} and not 4999"
    command_line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", *files, "-k", wanted]
    done = subprocess.run(command_line, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000]
    last = done.stdout.splitlines()[-1]
    assert " passed" in last, done.stdout[-500:]
    assert " skipped" not in last, done.stdout[-500:]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_sanitizer_finds_anything(tmp_path: Path, dtype: str) -> None:
    """The kernel tests once more, the library built with address and undefined-behaviour sanitizers."""
    require_native()
    real = find_compiler(os.environ)
    assert real is not None
    env = {
        **sanitized(real),
        "CC": shlex.join((*real.command, *SANITIZERS)),
        "BATON_CACHE": str(tmp_path / "cache"),
    }
    files = [
        "tests/unit/test_native_kernels.py",
        "tests/unit/test_native_attention.py",
        "tests/unit/test_native_halves.py",
        "tests/unit/test_native_quant.py",
        "tests/unit/test_native_sampling.py",
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", *files]
    wanted = f"{dtype} or (sampling and {level().name})"
    done = subprocess.run([*command, "-k", wanted], env=env, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-500:]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("clang") is None, reason="the native kernels are tried with clang where there is one")
def test_clang_builds_it_too(tmp_path: Path) -> None:
    path = shutil.which("clang")
    assert path is not None
    for one in LEVELS:
        compile_library(tmp_path / f"{one.name}.so", one, Compiler((path,), "clang"))


def test_numerics_differ_from_torch_s(built: Built) -> None:
    from shared.engine.numerics import numerics_id

    native = choose("native", built.path.parent)
    ids = {numerics_id(dtype, kernels) for dtype in ("float32", "bfloat16") for kernels in (native, choose("torch"))}
    assert len(ids) == 4
