"""Fixtures that need the default model; tests that use them are marked `model`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.model.fetch import cache_dir, fetch_default_model


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's folder, fetched into the user's cache on first use."""
    return fetch_default_model(cache_dir(os.environ), print)
