"""What share of the machine's own speed the engine reaches: `./baton bench engine` in a process, and what it found."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared.contracts.errors import Unavailable
from shared.settings.load import ROOT

LIMIT_S = 1200.0
LONGEST = {"int8": 8192}
"""Longest prompt measured, where it is more than bench engine's own: a minute or so a sample."""


def floor(model: str, folder: Path, quant: str, threads: int, seconds: float) -> dict[str, Any]:
    """Decode beside the sweep of the weights, prefill beside the products alone, measured in one run.

    Raises:
        Unavailable: the bench failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        out = Path(made) / "engine.json"
        command = [sys.executable, "-m", "services.cli", "bench", "engine", "--only", "native"]
        command += ["--model", str(folder), "--quant", "none" if quant == "bf16" else quant]
        command += ["--threads", str(threads), "--seconds", str(seconds), "--json", str(out)]
        command += ["--longest", str(LONGEST[quant])] if quant in LONGEST else []
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired as exc:
            raise Unavailable(f"bench engine did not end within {LIMIT_S:g} s") from exc
        if done.returncode:
            raise Unavailable(f"bench engine failed: {done.stderr.strip()[-800:]}")
        return floor_of(model, quant, json.loads(out.read_text(encoding="utf-8")))


def floor_of(model: str, quant: str, report: dict[str, Any]) -> dict[str, Any]:
    """The part of an engine report that is told. Pure."""
    sweep, size = report["figures"][0]["sweep_s"], report["weight_bytes"]
    return {
        "model": model,
        "quant": quant,
        "weight_bytes": size,
        "sweep_gb_s": size / sweep / 1e9 if sweep and size else None,
        "copy_gb_s": report["copy_gb_s"],
        "numerics": report["numerics"],
        "figures": report["figures"],
    }
