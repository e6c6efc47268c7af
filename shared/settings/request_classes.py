"""Which request classes a worker takes: `engine.classes` of one process, or an entry for each worker of a stack. Pure.

A stack's form is `interactive, analysis+batch`: the first worker takes one class, the second two, and those behind them
all. It is for pools by class: what is long or large then waits for workers of its own.
"""

from __future__ import annotations

from shared.contracts.grants import CLASSES
from shared.settings.sections import ModelEntry


def classes_of(given: str) -> tuple[str, ...]:
    """Of `engine.classes`: in the order of CLASSES, each once; () for all."""
    named = {name.strip() for name in given.split(",")}
    taken = tuple(klass for klass in CLASSES if klass in named)
    return () if taken == CLASSES else taken


def worker_classes(model: ModelEntry, role: str, number: int) -> str:
    """`engine.classes` of a model's worker; "" where its place has no entry.

    Args:
        number: of the worker among those of its role, from 1.
    """
    entries = _entries(model.prefill_classes if role == "prefill" else model.decode_classes)
    return entries[number - 1].replace("+", ",") if number <= len(entries) else ""


def classes_conflict(model: ModelEntry, role: str, others: str) -> str:
    """Why one of `served_models` cannot have its workers of a role so; "" for no reason.

    Args:
        others: `engine.classes`, of the workers without an entry.
    """
    given, count = (model.prefill_classes, model.prefill) if role == "prefill" else (model.decode_classes, model.decode)
    entries, workers = _entries(given), count or 0
    if len(entries) > workers:
        return f"has {len(entries)} entries for {workers} {role} workers"
    taken = {name.strip() for entry in entries for name in entry.split("+")}
    if len(entries) < workers:
        taken |= set(classes_of(others) or CLASSES)
    if role == "prefill":
        return ""
    missing = [klass for klass in CLASSES if klass not in taken]
    return f"leaves no decode worker to {' and '.join(missing)}" if missing else ""


def _entries(given: str | None) -> list[str]:
    return [entry.strip() for entry in (given or "").split(",") if entry.strip()]
