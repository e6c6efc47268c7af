"""A compose project of its own for a check: started, scaled, asked and taken away through the compose command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI

from services.cli.servers import free_port
from shared.settings.load import ROOT
from tests.compose.file import compose_command
from tests.stack.running import MODEL, until

UP_S, BUILD_S = 600, 3600
PYTHON = "/opt/baton/.venv/bin/python"


class ComposeError(Exception):
    """A compose command failed; the message ends with what it said."""


@dataclass
class Project:
    """The stack of compose.yaml under a name and on a port of its own, so that another one may run beside it."""

    name: str = "baton-check"
    port: int = field(default_factory=free_port)
    profiles: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    api_key: str = ""
    admin_key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---------------------------------------------------------------------------------------- commands

    def compose(self, *arguments: str, timeout_s: float = 180, progress: str = "quiet", stdin: str = "") -> str:
        """Run a compose command; its standard output. Raises ComposeError."""
        profiles = [part for profile in self.profiles for part in ("--profile", profile)]
        command = [*compose_command(), "-p", self.name, *profiles, "--progress", progress, *arguments]
        env = os.environ | {"BATON_PORT": str(self.port)} | self.variables
        done = subprocess.run(
            command, cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode:
            raise ComposeError(f"compose {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def absent(self) -> str:
        """Why no engine answers, in its own words; empty when one does."""
        try:
            self.containers()
        except ComposeError as exc:
            return str(exc).strip().splitlines()[-1]
        return ""

    def build(self) -> None:
        self.compose("build", "setup", timeout_s=BUILD_S, progress="plain")

    def up(self, *arguments: str) -> None:
        """Start what is not running and wait until everything is healthy; then read the keys."""
        self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(UP_S), *arguments, timeout_s=UP_S)
        lines = self.compose("run", "--rm", "--no-deps", "--no-TTY", "setup", "show-keys").splitlines()
        keys = dict(line.split(": ") for line in lines)
        self.api_key, self.admin_key = keys["api-key"], keys["admin-key"]

    def down(self, *arguments: str) -> None:
        self.compose("--profile", "*", "down", "--timeout", "30", *arguments)

    def python(self, service: str, program: str, stdin: str = "") -> str:
        """What a Python program prints that runs in a service's container, with that service's rights."""
        return self.compose("exec", "--no-TTY", service, PYTHON, "-P", "-c", program, stdin=stdin)

    def logs(self, *services: str) -> str:
        return self.compose("--profile", "*", "logs", "--no-color", "--timestamps", *services)

    # ---------------------------------------------------------------------------------------- what is there

    def containers(self) -> list[dict[str, Any]]:
        """Every container of the project, ended ones included."""
        lines = self.compose("--profile", "*", "ps", "--all", "--format", "json").splitlines()
        return [json.loads(line) for line in lines]

    def serving(self) -> dict[str, int]:
        """Service → number of its containers that run and are healthy or have no health check."""
        found: dict[str, int] = {}
        for container in self.containers():
            if container["State"] == "running" and container["Health"] in ("healthy", ""):
                found[container["Service"]] = found.get(container["Service"], 0) + 1
        return found

    def port_is_free(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) != 0

    # ---------------------------------------------------------------------------------------- clients

    def openai(self) -> OpenAI:
        """The official client; with its retries off, so that an error shows."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=300)

    def get(self, path: str) -> Any:
        """An admin's GET."""
        answer = httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {self.admin_key}"}, timeout=10)
        answer.raise_for_status()
        return answer.json()

    def trace(self, answer_id: str, *spans: str) -> dict[str, dict[str, Any]]:
        """Attributes by span name of a request's trace, once the spans named have come."""
        seen: dict[str, dict[str, Any]] = {}

        def complete() -> bool:
            answer = httpx.get(
                f"{self.url}/baton/traces/{answer_id}", headers={"Authorization": f"Bearer {self.admin_key}"}
            )
            if answer.status_code == 200:
                seen.update({span["name"]: span["attributes"] for span in answer.json()["spans"]})
            return set(spans) <= seen.keys()

        until(complete, 30, lambda: f"{set(spans) - seen.keys()} in the trace of {answer_id}")
        return seen

    def trace_id(self, answer_id: str) -> str:
        self.trace(answer_id, "gateway.request")
        found: str = self.get(f"/baton/traces/{answer_id}")["spans"][0]["trace_id"]
        return found

    def ask(self, prompt: str | list[int], max_tokens: int = 3) -> str:
        """The answer's id."""
        answer = self.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0)
        return answer.id
