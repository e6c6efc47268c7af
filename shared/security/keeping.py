"""How long what a tenant stored is kept, by its retention. Pure."""

from __future__ import annotations

LEAST_S = 60
"""An answer must be there long enough to be fetched."""


def kept_s(seconds: int, retention_s: int) -> int:
    """Seconds for which something is kept that otherwise would be kept for `seconds` (0: until it is deleted).

    Args:
        retention_s: as in `Grant`; negative: none.
    """
    if retention_s < 0:
        return seconds
    most = max(LEAST_S, retention_s)
    return min(seconds, most) if seconds else most
