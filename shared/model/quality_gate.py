"""The gate of number formats: only a configuration whose measured divergence passed may be a default. Without torch.

`python -m loadtest.quality` measures a configuration against float32 of the same weights; what it found is kept by the
weights' digest, in `quality_results.json` beside this file and in the user's cache. Records hold figures, no verdict:
the verdict is made of them here, by thresholds that were set before anything was measured.

float32 without integers is what everything is measured against: it needs no record.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.contracts.errors import SettingsError
from shared.store.secrets import write_atomic

log = logging.getLogger(__name__)

MOST_KL = 0.02
"""Most divergence, nats a position, of the mean of all sets."""
LEAST_TOP1 = 0.97
"""Least share of positions with float32's most likely token, of the mean of all sets."""
MOST_OF_MEAN = 2.0
"""No set's divergence may be more than so many times the mean."""
FORMAT = 1
AUTO, FLOAT32 = "auto", "float32"
SAME = "same"
"""Of KV: as the model computes."""
DEFAULTS = ("bfloat16",)
"""What dtype "auto" tries before float32, the fastest first."""
SHIPPED = Path(__file__).with_name("quality_results.json")


@dataclass(frozen=True, slots=True)
class SetFigures:
    """One set of texts: positions compared, mean KL(float32 || configuration) in nats, share of equal top tokens."""

    positions: int
    kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class Configuration:
    """What decides how a model's logits are rounded.

    `kernels` is the family that computes, "native" or "torch": its builds and instruction sets are held to one another
    by tests. `quant` is a key of `kernels.linear.quantize.GPU_QUANTS`: whoever raises RULE there measures anew. `kv` is
    the dtype KV is kept in, if another than what is computed in.
    """

    kernels: str
    dtype: str
    quant: str = "none"
    kv: str = SAME

    @property
    def is_exact(self) -> bool:
        """float32 or better, without integers of weights or KV: what others are measured against."""
        return self.dtype in (FLOAT32, "float64") and self.quant == "none" and self.kv == SAME

    def __str__(self) -> str:
        integers = "" if self.quant == "none" else f"{self.quant} over "
        kept = "" if self.kv == SAME else f", KV in {self.kv}"
        return f"{integers}{self.dtype} on {self.kernels} kernels{kept}"


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one configuration of one model."""

    model: str  # digest of configuration and weights
    name: str
    configuration: Configuration
    numerics: str  # of the build that was measured
    sets: Mapping[str, SetFigures]

    @property
    def kl(self) -> float:
        """The mean of the sets, each of the same weight however long its texts are."""
        return sum(figures.kl for figures in self.sets.values()) / len(self.sets)

    @property
    def top1(self) -> float:
        """The mean of the sets, as with `kl`."""
        return sum(figures.top1 for figures in self.sets.values()) / len(self.sets)

    def faults(self) -> list[str]:
        """What does not pass, in words; empty for a configuration that passed."""
        found = []
        if not self.kl <= MOST_KL:
            found.append(f"KL {self.kl:.4f} nat is above {MOST_KL:g}")
        if not self.top1 >= LEAST_TOP1:
            found.append(f"top-1 {self.top1:.2%} is below {LEAST_TOP1:.0%}")
        found += [
            f"{name}'s KL {figures.kl:.4f} nat is above {MOST_OF_MEAN:g} times the mean"
            for name, figures in self.sets.items()
            if not figures.kl <= MOST_OF_MEAN * self.kl
        ]
        return found

    @property
    def passed(self) -> bool:
        return not self.faults()

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED: " + "; ".join(self.faults())
        return f"KL {self.kl:.5f} nat, top-1 {self.top1:.2%}: {verdict}"


class Gate:
    """What is known of all models' configurations on this machine."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = {(record.model, record.configuration): record for record in records}

    def record(self, model: str, configuration: Configuration) -> Record | None:
        return self._records.get((model, configuration))

    def default_dtype(self, model: str, kernels: str, quant: str = "none") -> str:
        """The fastest dtype that passed for a model on these kernels; float32 where none did.

        Args:
            quant: of a checkpoint of integers, `Packing.name`; else integers do not count.
        """
        for dtype in DEFAULTS:
            if self.allows(model, Configuration(kernels, dtype, quant)):
                return dtype
        return FLOAT32

    def describe(self, model: str, configuration: Configuration, numerics: str = "") -> str:
        """A configuration and what is known of its quality, in a line.

        Args:
            numerics: of the build that computes; told where another was measured.
        """
        if configuration.is_exact:
            return f"{configuration}: what others are measured against"
        record = self.record(model, configuration)
        if record is None:
            return f"{configuration}: quality never measured for this model"
        other = "; measured with another build" if numerics not in ("", record.numerics) else ""
        return f"{configuration}: {record}{other}"

    def allows(self, model: str, configuration: Configuration) -> bool:
        """May it be a default? Whoever asks for another gets it, and a line of warning."""
        record = self.record(model, configuration)
        return configuration.is_exact or (record is not None and record.passed)


def open_gate(cache: Path) -> Gate:
    """What ships with the code and what this user measured; the user's own counts where both have one.

    A file of the cache that cannot be read counts as empty, with one line.
    """
    own = own_results(cache)
    return _gate(tuple(_stamp(path) for path in (SHIPPED, own)), SHIPPED, own)


@lru_cache(maxsize=4)
def _gate(stamps: Sequence[object], shipped: Path, own: Path) -> Gate:
    try:
        mine = read_records(own)
    except SettingsError as exc:
        log.warning("%s; it counts as empty", exc.message)
        mine = []
    return Gate([*read_records(shipped), *mine])


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def own_results(cache: Path) -> Path:
    """Where what a user measures is kept, under `shared.model.fetch.cache_dir`."""
    return cache / "quality.json"


def read_records(path: Path) -> list[Record]:
    """The records of a file; none where there is no file. Raises SettingsError naming file and record."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as exc:
        raise SettingsError(f"{path} cannot be read: {exc}", param=path.name) from exc
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("records"), list):
        raise SettingsError(f"{path} does not hold quality records of format {FORMAT}", param=path.name)
    return [_record(one, f"{path}: records[{number}]") for number, one in enumerate(raw["records"])]


def keep_record(path: Path, record: Record) -> None:
    """Add a record to a file, in place of an older one of the same model and configuration.

    Raises:
        SettingsError: the file there is no such file, or cannot be written.
    """
    same = (record.model, record.configuration)
    kept = [one for one in read_records(path) if (one.model, one.configuration) != same]
    body = {"format": FORMAT, "records": [asdict(one) for one in [*kept, record]]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(body, indent=1, allow_nan=False) + "\n").encode())
    except OSError as exc:
        raise SettingsError(f"{path} cannot be written: {exc.strerror}", param=path.name) from exc


def _record(raw: Any, where: str) -> Record:
    try:
        record = Record(
            model=_text(raw["model"]),
            name=_text(raw["name"]),
            configuration=Configuration(**{name: _text(value) for name, value in raw["configuration"].items()}),
            numerics=_text(raw["numerics"]),
            sets={_text(name): _figures(one) for name, one in raw["sets"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise SettingsError(f"{where} is not a quality record: {exc}", param="records") from exc
    if not record.sets:
        raise SettingsError(f"{where} has no sets", param="records")
    return record


def _figures(raw: Mapping[str, Any]) -> SetFigures:
    figures = SetFigures(int(raw["positions"]), float(raw["kl"]), float(raw["top1"]))
    if figures.positions < 1 or not math.isfinite(figures.kl) or not 0 <= figures.top1 <= 1:
        raise ValueError(f"impossible figures {figures}")
    return figures


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
