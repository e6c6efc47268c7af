"""The whole of compose.yaml with its users' commands, where a Docker engine answers; builds the image first."""

from __future__ import annotations

import pytest

from tests.compose.check import main

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_compose_comes_up_serves_scales_and_comes_back() -> None:
    assert main(["--build"]) == 0
