"""Native libraries that come with an installation, as in an image: made for all levels, used without a compiler."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import pytest

from kernels.native import ship as shipping
from kernels.native.build import SHIPPED, Built, ensure_library, find_shipped, library_for_machine
from kernels.native.compiler import Compiler, NativeUnavailable, NoCompiler, find_compiler
from kernels.native.cpu import LEVELS, VARIABLE, Level, levels_of, machine_levels
from kernels.native.library import open_library
from kernels.native.ship import have_compiler, main, ship
from services.cli import doctor_stack
from services.cli.doctor import OK
from shared.model.fetch import cache_dir
from shared.settings.sections import Settings
from tests.native import require_native

OF_MACHINE = [level for level in LEVELS if level.machine == platform.machine()]


@pytest.fixture(scope="module")
def built() -> Built:
    require_native()
    return ensure_library(cache_dir(os.environ) / "kernels", machine_levels({})[0], os.environ)


@pytest.fixture
def compiler(tmp_path: Path, built: Built) -> Compiler:
    """Hands out a library built before, but for the levels named in `cannot`."""
    path = tmp_path / "fake-cc"
    path.write_text(
        f'#!/bin/sh\nfor flag in $(cat "{tmp_path}/cannot"); do\n'
        'for a; do [ "$a" = "$flag" ] && { echo "error: no $flag" >&2; exit 1; }; done; done\n'
        f'while [ "$1" != -o ]; do shift; done\ncp "{built.path}" "$2"\n'
    )
    path.chmod(0o755)
    (tmp_path / "cannot").write_text("")
    return Compiler((str(path),), "fake 1.0")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a container: libraries in a folder, no compiler, nowhere to keep one."""
    monkeypatch.setattr("kernels.native.compiler.importlib.util.find_spec", lambda name: None)
    return {SHIPPED: str(tmp_path / "shipped"), "PATH": str(tmp_path / "nothing")}


def shipped(folder: Path, compiler: Compiler) -> list[Path]:
    return ship(folder, compiler, OF_MACHINE, machine_levels({})[:1], lambda line: None)


def test_every_level_is_shipped_that_the_compiler_can(tmp_path: Path, compiler: Compiler) -> None:
    said: list[str] = []
    best = machine_levels({})[0]
    made = ship(tmp_path / "shipped", compiler, OF_MACHINE, [best], said.append)
    assert [path.stem.split("-")[1] for path in made] == [level.name for level in OF_MACHINE]
    assert len({path.stem.split("-")[0] for path in made}) == 1
    assert sorted(path.suffix for path in (tmp_path / "shipped").iterdir()) == sorted([".so", ".sum"] * len(made))
    assert f"{best.name}: tried" in said
    # Given: a compiler too old for a level
    (tmp_path / "cannot").write_text(OF_MACHINE[0].flags[-1])
    said.clear()
    made = ship(tmp_path / "older", compiler, OF_MACHINE, [], said.append)
    assert [path.stem.split("-")[1] for path in made] == [level.name for level in OF_MACHINE[1:]]
    assert f"{OF_MACHINE[0].name}: left out: {compiler.name} cannot build the native kernels: error: no" in said[0]


def test_a_shipped_library_is_used_without_a_compiler(
    tmp_path: Path, compiler: Compiler, bare: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    made = shipped(tmp_path / "shipped", compiler)
    best = machine_levels({})[0]
    for path in made:
        assert path.stat().st_mode & 0o777 == 0o644
    with caplog.at_level(logging.WARNING):
        found = library_for_machine(tmp_path / "kept", bare)
        assert open_library(tmp_path / "kept", bare).id.startswith(found.id)
    assert (found.level, found.path.parent) == (best.name, tmp_path / "shipped")
    assert not caplog.records
    assert not (tmp_path / "kept").exists()
    told = doctor_stack.kernels(Settings(), bare)
    assert (told.verdict, told.detail) == (OK, f"native, {best.name}, shipped in {tmp_path / 'shipped'}")
    # and a level that is forced down is not gone above
    lower = machine_levels({})[-1]
    assert library_for_machine(tmp_path / "kept", {**bare, VARIABLE: lower.name}).level == lower.name


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("one byte", "not what was compiled"),
        ("no sum", "not what was compiled"),
        ("others may write", "written by them"),
        ("others may write the folder", "written by them"),
        ("does not run", "failed their trial"),
    ],
)
def test_one_that_cannot_be_used_is_a_line(
    tmp_path: Path, compiler: Compiler, bare: dict[str, str], caplog: pytest.LogCaptureFixture, harm: str, words: str
) -> None:
    best = machine_levels({})[0]
    if harm == "does not run":
        Path(compiler.command[0]).write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho rubbish > "$2"\n')
    (path,) = ship(tmp_path / "shipped", compiler, [best], [], lambda line: None)
    if harm == "one byte":
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "no sum":
        path.with_suffix(".sum").unlink()
    elif harm == "others may write":
        path.chmod(0o666)
    elif harm == "others may write the folder":
        path.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING), pytest.raises(NoCompiler):
        library_for_machine(tmp_path / "kept", bare)
    assert [words in record.message for record in caplog.records] == [True]
    assert "\n" not in caplog.records[0].message


def test_a_lower_level_is_used_where_the_best_does_not_run(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    best, lower = OF_MACHINE[:2]
    for level in (best, lower):
        ship(tmp_path / "shipped", compiler, [level], [], lambda line: None)
    crash = tmp_path / "crash-cc"
    real = find_compiler(os.environ)
    if real is None:
        pytest.skip("no C compiler")
    crash.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'echo "void baton_sizes(void) {{ __builtin_trap(); }}" | {real.name} -shared -fPIC -x c - -o "$2"\n'
    )
    crash.chmod(0o755)
    ship(tmp_path / "shipped", Compiler((str(crash),), compiler.version), [best], [], lambda line: None)
    with caplog.at_level(logging.WARNING):
        found = find_shipped(tmp_path / "shipped", [best, lower])
    assert found is not None
    assert found.level == lower.name
    assert ["signal" in record.message for record in caplog.records] == [True]


def test_libraries_of_other_sources_are_not_used(
    tmp_path: Path, compiler: Compiler, bare: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for path in shipped(tmp_path / "shipped", compiler):
        for one in (path, path.with_suffix(".sum")):
            one.rename(one.with_name("0" + one.name))
    with caplog.at_level(logging.WARNING), pytest.raises(NoCompiler):
        library_for_machine(tmp_path / "kept", bare)
    assert ["no library of these sources" in record.message for record in caplog.records] == [True]


def test_zig_is_fetched_for_shipping_but_not_in_place_of_a_named_compiler(tmp_path: Path, bare: dict[str, str]) -> None:
    said: list[str] = []

    def fetch(tools: Path) -> None:
        raise NativeUnavailable("no network")

    with pytest.raises(NativeUnavailable, match="no network"):
        have_compiler(bare, tmp_path, said.append, fetch)
    assert said[0].startswith("no C compiler: fetching zig")
    with pytest.raises(NoCompiler, match="CC=icc"):
        have_compiler({**bare, "CC": "icc"}, tmp_path, said.append, fetch)
    assert len(said) == 1


def test_shipping_nothing_is_an_error(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipping, "have_compiler", lambda env, tools, say: compiler)
    assert main([str(tmp_path / "shipped")]) == 0
    (tmp_path / "cannot").write_text("-O3")
    assert main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "native kernels: no library could be compiled"
    assert main([]) == 2


def test_levels_go_down_from_what_is_allowed() -> None:
    flags = frozenset[str]().union(*(level.needs for level in LEVELS))

    def names(levels: tuple[Level, ...]) -> list[str]:
        return [level.name for level in levels]

    assert names(levels_of(flags)) == ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]
    assert names(levels_of(flags - {"avx512_vnni"}, "avx512")) == ["avx512", "avx2"]
    assert levels_of(flags, "none") == ()
