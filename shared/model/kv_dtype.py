"""The number format KV is kept in: as the model computes, or 8-bit values where its kernels read them."""

from __future__ import annotations

from shared.contracts.errors import SettingsError
from shared.kv.layout import FP8, INT8, KV_SETTINGS
from shared.model.decoder import Model

AUTO = "auto"
MOST_HEAD_DIM = 512
"""Elements of a head whose products as integers fit 32 bits (`kernels/native/check.c`)."""
FP8_CAPABILITY = (8, 9)
"""Of the first cards that convert to float8."""
_PARAM = "kv.dtype"


def kv_dtype_of(wanted: str, model: Model) -> str:
    """The dtype of a model's pool.

    Args:
        wanted: "auto" for the one the model computes in, or what a setting calls one.

    Raises:
        SettingsError: it is neither that nor int8, or these kernels read no integers.
    """
    computed = str(model.dtype).removeprefix("torch.")
    if wanted in (AUTO, computed):
        return computed
    if wanted in ("fp8", FP8):
        raise SettingsError("kv.dtype 'fp8' needs a GPU, and a CPU computes here", param=_PARAM)
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


def kv_dtype_on_gpu(wanted: str, computed: str, capability: tuple[int, int]) -> str:
    """The same on a GPU of that compute capability, for a model that computes in `computed`.

    Raises:
        SettingsError: it is none of these, or the card has no such values.
    """
    if wanted in (AUTO, computed):
        return computed
    if wanted not in KV_SETTINGS:
        kept = ", ".join((computed, *KV_SETTINGS))
        raise SettingsError(
            f"kv.dtype {wanted!r} with a model that computes in {computed}: on a GPU its KV is one of {kept}",
            param=_PARAM,
        )
    if wanted == "fp8" and capability < FP8_CAPABILITY:
        has, needs = ("sm_{}{}".format(*pair) for pair in (capability, FP8_CAPABILITY))
        raise SettingsError(f"kv.dtype 'fp8' needs {needs} or newer, this GPU is {has}: int8 works on it", param=_PARAM)
    return KV_SETTINGS[wanted]
