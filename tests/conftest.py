"""Fixture modules shared by all tests."""

import signal

pytest_plugins = [
    *("tests.answer_watch", "tests.model_fixtures", "tests.servers", "tests.skip_policy", "tests.stack.fixtures"),
]

# A shell that starts a program in the background has it ignore Ctrl-C, and so would every process of ours it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
