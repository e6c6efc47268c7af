"""Whether a model's weights fit into memory: found out before they are read, since too many end in a kill."""

from __future__ import annotations

from shared.contracts.errors import SettingsError
from shared.engine.free_memory import free_memory_bytes


def require_room(size: int) -> None:
    """Raises SettingsError if weights of `size` bytes do not fit into the memory that is free."""
    if size > (free := free_memory_bytes()):
        raise too_large(size, free)


def too_large(size: int, free: int) -> SettingsError:
    text = f"the model's weights take {size / 2**30:.2f} GiB of memory, of which {free / 2**30:.2f} GiB are free"
    return SettingsError(f"{text}; a smaller model, bfloat16 or engine.quant takes less", param="model.path")
