"""The number format KV is kept in: as the model computes, float16, or 8-bit values where its kernels read them."""

from __future__ import annotations

from shared.contracts.errors import SettingsError
from shared.kv.layout import FLOAT16, FP8, INT8, KV_SETTINGS
from shared.model.decoder import DTYPES, Model

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
        SettingsError: it is neither that nor float16 nor int8, or these kernels read no integers.
    """
    computed = str(model.dtype).removeprefix("torch.")
    if wanted in (AUTO, computed):
        return computed
    if wanted == FLOAT16:
        return FLOAT16
    kept = dict.fromkeys((AUTO, computed, FLOAT16))
    if wanted in ("fp8", FP8):
        raise _refused(f"kv.dtype 'fp8' needs a GPU, and a CPU computes here: {', '.join((*kept, INT8))} work")
    if wanted != INT8:
        raise _refused(
            f"kv.dtype {wanted!r} with a model that computes in {computed}: its KV is one of {', '.join((*kept, INT8))}"
        )
    if model.kernels.native is None:
        why = "needs the native kernels, and others compute here"
        raise _refused(f"kv.dtype {wanted!r} {why}: {', '.join(kept)} work with them")
    if model.config.head_dim > MOST_HEAD_DIM:
        heads = f"takes heads of up to {MOST_HEAD_DIM}, this model's have {model.config.head_dim}"
        raise _refused(f"kv.dtype {wanted!r} {heads}: {', '.join(kept)} take any")
    return INT8


def _refused(reason: str) -> SettingsError:
    return SettingsError(reason, param=_PARAM)


def takes_kv(model: Model, dtype: str) -> bool:
    """Whether a model on a CPU computes over a pool of that dtype."""
    if dtype == INT8:
        return model.kernels.native is not None
    return dtype == FLOAT16 or DTYPES.get(dtype) == model.dtype


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
