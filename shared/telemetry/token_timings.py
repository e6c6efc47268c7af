"""When tokens came, kept as numbers and written once, at the end: never a span a token."""

from __future__ import annotations

import array

from shared.telemetry import attributes as a


class TokenTimings:
    """Latency of one output stream.

    Args:
        start: seconds, monotonic: when the client's request arrived.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._last = start
        self._gaps = array.array("d")
        self.ttft_s: float | None = None
        """Seconds to the first token; None before it."""
        self.count = 0
        """Tokens so far."""

    def add(self, now: float, tokens: int) -> None:
        """`tokens` arrived together at `now`. Several share their gap evenly."""
        if tokens == 1 and self.ttft_s is not None:
            self._gaps.append(now - self._last)
        elif tokens <= 0:
            return
        elif self.ttft_s is None:
            self.ttft_s = now - self._start
            tokens_after = tokens - 1
            self._gaps.extend([0.0] * tokens_after)
        else:
            self._gaps.extend([(now - self._last) / tokens] * tokens)
        self._last = now
        self.count += tokens

    def summary(self) -> dict[str, float]:
        """Span attributes: TTFT and the inter-token latency's median, 95th percentile and maximum, in seconds."""
        if self.ttft_s is None:
            return {}
        values = {a.TTFT_S: self.ttft_s}
        if self._gaps:
            gaps = sorted(self._gaps)
            values[a.ITL_P50_S] = gaps[len(gaps) // 2]
            values[a.ITL_P95_S] = gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))]
            values[a.ITL_MAX_S] = gaps[-1]
        return values
