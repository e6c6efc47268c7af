"""The one-shot `model` service of compose.yaml: sees to it that the checkpoint the workers will load is there.

The default model is fetched when it is missing. Another one is the operator's to bring; that it is missing is said
here, before six services wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.contracts.errors import BatonError, SettingsError
from shared.model.fetch import cache_dir, default_model_dir, fetch_default_model

Fetch = Callable[[Path, Callable[[str], None]], Path]


def ensure_model(env: Mapping[str, str], say: Callable[[str], None], fetch: Fetch = fetch_default_model) -> Path:
    """The folder of the model `BATON_MODEL_PATH` names, made if it is the default one.

    Raises:
        SettingsError: it is another folder than the default model's, and holds no checkpoint.
        Unavailable, Internal: the default model could not be fetched.
    """
    default = default_model_dir(cache_dir(env))
    wanted = Path(env.get("BATON_MODEL_PATH") or default)
    if wanted == default:
        return fetch(cache_dir(env), say)
    if not (wanted / "config.json").is_file():
        raise SettingsError(
            f"BATON_MODEL_PATH={wanted}: no config.json there; /models is the volume `models`",
            param="BATON_MODEL_PATH",
        )
    return wanted


def main() -> int:
    try:
        folder = ensure_model(os.environ, lambda line: print(line, file=sys.stderr, flush=True))
    except (BatonError, OSError) as exc:
        print(f"model: {exc}; or give a folder of this machine with BATON_MODELS", file=sys.stderr)
        return 1
    print(f"model: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
