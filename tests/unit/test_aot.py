"""Compiling ahead of time: the committed table is of these kernels, and nothing in it breaks a limit.

In processes of their own: here kernels may be for the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.aot import table
from kernels.aot.assembly import Loop, loop_of
from kernels.aot.table import Row, faults, load, save

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=170)


def test_every_kernel_is_in_the_table_and_within_the_limits() -> None:
    """What differs is compiled for real, and fails here until the table says so too."""
    done = run("-m", "kernels.aot")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_has_no_spill_in_attention() -> None:
    rows = [row for row in load() if row.variant.startswith("attention-") and row.kernel == "attend_kernel"]
    assert {row.chip for row in rows} == {"sm_80", "sm_89", "sm_90"}
    assert len(rows) <= 48
    assert not [row for row in rows if row.spilled]
    assert all(row.loop for row in rows)


def test_products_of_float8_are_added_up_outside_tensor_cores() -> None:
    """Which hold sums of them in few bits. Folded into the product, a whole split would be summed in those."""
    code = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kernels.aot.launches import record
from kernels.aot.operations import FLOAT8
from kernels.aot.variants import variants
from kernels.chip import pretend

(variant,) = (variant for variant in variants() if variant.name == "linear-fp8-1-6144")
for chip in FLOAT8:
    with pretend(chip):
        (launch,) = (launch for launch in record(variant.call) if launch.kernel.fn.__name__ == "split_linear_kernel")
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    target = GPUTarget("cuda", chip[0] * 10 + chip[1], 32)
    text = compile(source, target=target, options=launch.options).asm["ttir"]
    (product,) = re.findall(r"(%\\w+) = tt\\.dot ", text)
    print(len(re.findall(rf"arith\\.addf .*{product}\\b", text)))
"""
    done = run("-c", code)
    assert done.stdout.split() == ["1", "1"], done.stdout + done.stderr


ROW = Row("decode", "attend_kernel", "sm_90", "0" * 32, 255, 0, 1000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spilled": 8}, "decode: attend_kernel for sm_90 spills 8 bytes a thread"),
        ({"shared": 300_000}, "wants 300000 bytes of shared memory, the chip has 232448"),
        ({"shared": 170_000, "chip": "sm_80"}, "the chip has 166912"),
        ({"in_turn": 12}, "waits for 12 products one by one"),
    ],
)
def test_what_breaks_a_limit_is_told(change: dict[str, object], words: str) -> None:
    row = Row(**{name: change.get(name, getattr(ROW, name)) for name in Row.__slots__})  # type: ignore[arg-type]
    assert words in " ".join(faults(row, may_spill=False))


CODE = """
.L_x_1:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDS.128 R4, [R2] ;
.L_x_2:
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR16], RZ, !UPT{wait} ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR20], R88, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   F2FP.BF16.F32.PACK_AB R98, R119, R118 ;
        /*0080*/              @!P1 BRA `(.L_x_2) ;
        /*0090*/               @P2 BRA `(.L_x_1) ;
        /*00a0*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*00b0*/                   EXIT ;
"""
TURN = ", gsb0 ;\n        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_what_a_loop_of_products_does_is_counted() -> None:
    kinds = (("product", 2), ("wait", 2), ("convert", 1), ("other", 1))
    assert loop_of(CODE.format(wait="").splitlines()) == Loop(6, 0, kinds)
    in_turn = loop_of(CODE.format(wait=TURN).splitlines())
    assert (in_turn.instructions, in_turn.in_turn) == (7, 2)
    assert loop_of(CODE.replace("HGMMA", "FFMA").splitlines()) == Loop()


def test_a_row_that_breaks_a_limit_fails_the_command() -> None:
    code = """
from dataclasses import replace
from kernels.aot import __main__, table

rows = [replace(row, spilled=8) for row in table.load()]
table.load = lambda: rows
raise SystemExit(__main__.main(["--only", "attention-plan"]))
"""
    done = run("-c", code)
    assert done.returncode == 1
    assert "attention-plan: plan_kernel for sm_90 spills 8 bytes a thread" in done.stderr


def test_a_spill_may_be_allowed_and_a_good_row_is_good() -> None:
    assert not list(faults(Row(*[*ROW.key, 255, 64, 0]), may_spill=True))
    assert not list(faults(ROW, may_spill=False))


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    other = Row("a", "k", "sm_80", "1" * 32, 1, 2, 3)
    save([ROW, other], tmp_path / "table.json")
    assert load(tmp_path / "table.json") == [other, ROW]
    assert load(tmp_path / "none.json") == []
    assert table.FILE.exists()


def test_content_not_place_decides_what_is_compiled() -> None:
    """A moved kernel keeps its id; another constant, type, chip or line of code does not."""
    code = """
import importlib.util, sys, pathlib, tempfile
import torch
from kernels.aot.compiler import content_id
from kernels.aot.launches import record

KERNEL = '''
import triton
import triton.language as tl

@triton.jit
def helper(x):
    return x * 2

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, helper(tl.load(x_ptr + o, mask=o < n)), mask=o < n)
'''
folder = pathlib.Path(tempfile.mkdtemp())
def launch(text, n=7, block=8, dtype=torch.float32):
    file = folder / f"m{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    (one,) = record(lambda: module.kernel[(1,)](torch.zeros(8, dtype=dtype), n, BLOCK=block))
    return one
ids = [content_id(launch(KERNEL), (9, 0)), content_id(launch("\\n\\n# moved\\n" + KERNEL), (9, 0)),
       content_id(launch(KERNEL), (8, 0)), content_id(launch(KERNEL, n=16), (9, 0)),
       content_id(launch(KERNEL, n=1), (9, 0)),
       content_id(launch(KERNEL, block=16), (9, 0)), content_id(launch(KERNEL, dtype=torch.bfloat16), (9, 0)),
       content_id(launch(KERNEL.replace("x * 2", "x * 3")), (9, 0)), content_id(launch(KERNEL, n=9), (9, 0))]
print(ids[0] == ids[1] == ids[8], len(set(ids)))
"""
    done = run("-c", code)
    assert done.stdout.split() == ["True", "7"], done.stdout + done.stderr
