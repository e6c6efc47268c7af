"""Figures and table of `loadtest/gateway.py`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from loadtest.gateway_client import Heard
from loadtest.machine import IDLE_CORES


def latency_of(heard: Sequence[Heard], sent: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Milliseconds: from asking to the first token, from asking to the scheduler, from a token's leaving to its client.

    Of answers in which several tokens came as one chunk, only the first is in the last one.

    Args:
        sent: by request id, when it came to the scheduler and then when each token left.
    """
    first = [one.at[0] - one.sent for one in heard]
    there, back = list[float](), list[float]()
    for one in heard:
        came, *tokens = sent.get(one.request_id, (one.sent,))
        there.append(came - one.sent)
        pairs = list(zip(tokens, one.at, strict=False))
        back += [at - left for left, at in (pairs if len(tokens) == len(one.at) else pairs[:1])]
    gaps = [b - a for one in heard for a, b in zip(one.at, one.at[1:], strict=False)]
    values = {"first_token": first, "to_scheduler": there, "token_delay": back, "gap": gaps}
    return {
        f"{name}_p{share}_ms": _at(sorted(some), share / 100) * 1e3
        for name, some in values.items()
        for share in (50, 99)
    }


def streams_of(
    heard: Sequence[Heard], sent: Mapping[str, Sequence[float]], seconds: float, used_s: float
) -> dict[str, float]:
    """Tokens a second, processor microseconds of the gateway a token, and the share of chunks that held one token."""
    tokens = sum(len(sent[one.request_id]) - 1 for one in heard)
    chunks = sum(len(one.at) for one in heard)
    return {
        "requests": len(heard),
        "tokens": tokens,
        "tokens_s": tokens / seconds,
        "gateway_us_a_token": used_s / tokens * 1e6,
        "chunks_a_token": chunks / tokens,
    }


def text_of(report: Mapping[str, Any]) -> str:
    """The table: medians over the rounds.

    `there` is from asking to the scheduler, policy's answer included; `back` from a token's leaving to its client.
    """
    machine = report["machine"]
    columns = (
        ("first_token_p50_ms", 9, 2),
        ("first_token_p99_ms", 9, 2),
        ("to_scheduler_p50_ms", 9, 2),
        ("token_delay_p50_ms", 9, 2),
        ("token_delay_p99_ms", 9, 2),
        ("tokens_s", 9, 0),
        ("gateway_us_a_token", 9, 1),
    )
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}",
        f"{'':20}{'first token, ms':>18}{'there':>9}{'back, ms':>18}{'tokens':>9}{'gateway':>9}{'gateway':>9}",
        f"{'':20}{'p50':>9}{'p99':>9}{'p50':>9}{'p50':>9}{'p99':>9}{'/s':>9}{'us/token':>9}{'cores':>9}",
    ]
    kinds = list(dict.fromkeys(row["kind"] for row in report["rows"]))
    for kind in kinds:
        some = [row for row in report["rows"] if row["kind"] == kind]
        cells = (f"{median(row[key] for row in some):{width}.{digits}f}" for key, width, digits in columns)
        cores = median(sum(row["gateway_cores"]) for row in some)
        lines.append(f"{kind:20}" + "".join(cells) + f"{cores:9.2f}")
    lines += _own_share([row for row in report["rows"] if "own_p50_ms" in row])
    alone, beside = (
        median(row["tokens_s"] for row in report["rows"] if row["kind"] == kind)
        for kind in ("alone", "beside wrong keys")
    )
    refused = median(row["refused"] for row in report["rows"] if row["kind"] == "beside wrong keys")
    lines.append(f"A stream beside {refused:.0f} refused requests had {beside / alone:.1%} of its rate alone.")
    if any(row["foreign_cores"] > IDLE_CORES for row in report["rows"]):
        lines.append(f"Others used more than {IDLE_CORES:g} cores: these figures are no measure of this machine.")
    return "\n".join(lines)


def _own_share(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of a first token's way is the gateway's own, and what it waited for; see `gateway_notes.shares_of`."""
    if not rows:
        return []
    names = ("to_policy", "to_submit", "to_client", "own", "policy_hop", "token_hop")
    lines = [
        "Of the way to the first token, ms, in the gateway's process:",
        "".join((f"{'':20}", *(f"{name.replace('_', ' '):>12}" for name in names))),
    ]
    for share in (50, 99):
        cells = (f"{median(row[f'{name}_p{share}_ms'] for row in rows):12.2f}" for name in names)
        lines.append(f"{f'p{share}':20}" + "".join(cells))
    return lines


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
