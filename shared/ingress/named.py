"""Errors of the request that is run, by the names that fields have in the API it was asked by. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.contracts.errors import InvalidInput

Names = Sequence[tuple[re.Pattern[str], str]]
"""Beginnings of fields' names there, and what they are here; the first that fits counts."""


def renamed(error: InvalidInput, names: Names) -> InvalidInput:
    """The error, with the field's name in `param` and at the beginning of its message.

    It may be the very same one. So raise it `from None`: an error that is its own cause holds the prompt with it.
    """
    for pattern, name in names:
        param = pattern.sub(name, error.param)
        if param != error.param:
            message = error.message
            if message.startswith(error.param):
                message = param + message.removeprefix(error.param)
            return type(error)(message, param=param, code=error.code)
    return error
