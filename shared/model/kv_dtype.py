"""The number format KV is kept in: as the model computes, or 8-bit integers where its kernels read them."""

from __future__ import annotations

from shared.contracts.errors import SettingsError
from shared.kv.layout import INT8
from shared.model.decoder import Model

AUTO = "auto"
MOST_HEAD_DIM = 512
"""Elements of a head whose products as integers fit 32 bits (`kernels/native/check.c`)."""
_PARAM = "kv.dtype"


def kv_dtype_of(wanted: str, model: Model) -> str:
    """The dtype of a model's pool.

    Args:
        wanted: "auto" for the one the model computes in, or the name of one.

    Raises:
        SettingsError: it is neither that nor int8, or these kernels read no integers.
    """
    computed = str(model.dtype).removeprefix("torch.")
    if wanted in (AUTO, computed):
        return computed
    if wanted != INT8:
        raise SettingsError(
            f"kv.dtype {wanted!r} with a model that computes in {computed}: its KV is kept in {computed} or {INT8}",
            param=_PARAM,
        )
    if model.kernels.native is None:
        raise SettingsError(f"kv.dtype {wanted!r} needs the native kernels, and others compute here", param=_PARAM)
    if model.config.head_dim > MOST_HEAD_DIM:
        raise SettingsError(
            f"kv.dtype {wanted!r} takes heads of up to {MOST_HEAD_DIM}, this model's have {model.config.head_dim}",
            param=_PARAM,
        )
    return INT8


def require_kv_dtype_on_gpu(wanted: str, computed: str) -> None:
    """Raises SettingsError unless a GPU's pool of dtype `computed` is what is wanted."""
    if wanted not in (AUTO, computed):
        raise SettingsError(
            f"kv.dtype {wanted!r} does not run on a GPU, whose KV is as the model computes: {computed}", param=_PARAM
        )
