"""`--detach`: the stack runs in a process of its own session, and the command returns when it is ready.

The launcher starts the same command again with pipes for its output, passes progress on, and leaves when the pipe
closes: the supervisor closes it once it is ready, or by ending.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

DAEMON_VARIABLE = "BATON_DETACHED"


def become_daemon_child(env: Mapping[str, str]) -> bool:
    """True inside the process `launch_detached` started."""
    return env.get(DAEMON_VARIABLE) == "1"


def launch_detached(argv: Sequence[str], log: Path) -> int:
    """Start `up` with `argv` in the background; 0 once it is ready, else its exit code."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "up", *argv],
        env={**os.environ, DAEMON_VARIABLE: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    passing = threading.Thread(target=_pass_on, args=(process.stderr, sys.stderr.buffer), daemon=True)
    passing.start()
    answer = b""
    try:
        answer = process.stdout.read()
    except KeyboardInterrupt:
        process.terminate()
    if answer:
        # Ready: the supervisor has let go of both pipes.
        sys.stdout.buffer.write(answer)
        sys.stdout.flush()
        return 0
    code = process.wait()
    passing.join()
    return code or 1


def finish_handover(env: Mapping[str, str], log: Path) -> None:
    """In the background process, when ready: write to the log from now on, which lets the launcher return."""
    if not become_daemon_child(env):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _pass_on(source: IO[bytes], target: IO[bytes]) -> None:
    while part := os.read(source.fileno(), 4096):
        target.write(part)
        target.flush()
