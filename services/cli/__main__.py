"""`python -m services.cli COMMAND …`, which is what `./baton COMMAND …` runs."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from shared.version import VERSION

COMMANDS = {
    "up": ("services.cli.up", "main", "start a stack: servers, services, workers"),
    "down": ("services.cli.down", "main", "stop it"),
    "restart": ("services.cli.restart", "main", "restart services one process after the other, streams going on"),
    "status": ("services.cli.status", "main", "show the running stack and its workers"),
    "top": ("services.cli.top", "main", "watch requests, queues and workers"),
    "chat": ("services.cli.chat", "main", "ask the running stack and stream the answer"),
    "batch": ("services.cli.batch", "main", "submit, watch, cancel batch jobs and fetch their results"),
    "keys": ("services.cli.keys", "main", "make, list and revoke tenants' keys, queue credentials and limits"),
    "purge": ("services.cli.purge", "main", "take everything of a tenant out of the stack, with a signed receipt"),
    "trace": ("services.cli.trace", "main", "list recent requests, or show one as a waterfall"),
    "logs": ("services.cli.log_reader", "main", "read and follow the logs of all services as one"),
    "doctor": ("services.cli.doctor", "main", "say what is missing or wrong here, and the fix"),
    "config": ("services.cli.config", "main", "check or show the settings, and where each came from"),
    "bench": ("loadtest.bench", "main", "measure this machine: smoke, engine, peers, quality, speculation, ..."),
    "test": ("services.cli.check", "main", "lint, types and all tests"),
}

USAGE = "usage: ./baton COMMAND [options]      ./baton COMMAND --help tells more\n\n" + "\n".join(
    f"  {name:<8} {summary}" for name, (_, _, summary) in COMMANDS.items()
)
EXIT_USAGE, EXIT_INTERRUPTED = 2, 128 + signal.SIGINT


def main(argv: Sequence[str]) -> int:
    """Dispatch; a reader of our output that left (`./baton trace | head`) and Ctrl-C end the command quietly."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of few characters shows a ? for the others
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would fail once more in its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _dispatch(argv: Sequence[str]) -> int:
    """Commands are imported only when asked for, so each starts as fast as it can."""
    if not argv or argv[0] not in COMMANDS:
        return refuse(argv)
    module, function, _ = COMMANDS[argv[0]]
    command = getattr(importlib.import_module(module), function)
    code: int = command(argv[1:])
    return code


def refuse(argv: Sequence[str]) -> int:
    """Answer what is no command: help or the version when asked for (0), else help as an error (2)."""
    if argv and argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if argv and argv[0] in ("-V", "--version", "version"):
        print(f"baton {VERSION}")
        return 0
    if argv:
        import difflib  # here alone: commands start as fast as they can

        meant = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        print(f"baton: no command {argv[0]!r}{f'; did you mean {meant[0]}?' if meant else ''}\n", file=sys.stderr)
    print(USAGE, file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
