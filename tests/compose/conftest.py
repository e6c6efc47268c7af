"""What tests of the compose stack need: a Docker engine that answers."""

from __future__ import annotations

import pytest
from docker import from_env
from docker.errors import DockerException


@pytest.fixture(scope="session")
def engine() -> str:
    """The engine's version; skips where none answers."""
    try:
        client = from_env(timeout=5)
        version = str(client.version()["Version"])
        client.close()
    except DockerException:
        pytest.skip("no Docker engine answers")
    return version
