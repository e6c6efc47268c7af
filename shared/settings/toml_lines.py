"""Where in a TOML text each key stands. tomllib parses but forgets the lines; error messages need them."""

from __future__ import annotations

import re

_ARRAY = re.compile(r"^\s*\[\[\s*([^\[\]]+?)\s*\]\]\s*(?:#.*)?$")
_TABLE = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*([A-Za-z0-9_\-."']+)\s*=\s*(.*)$""")
_MULTILINE = ('"""', "'''")


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of each `table.key` and of each table header, in dotted form; of `[[tables]]` as `tables.0.key`.

    Good for files of tables with one key a line, multi-line strings included; keys inside inline tables share the line
    of the table.
    """
    lines: dict[str, int] = {}
    table, closing = "", ""
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            if closing in line:
                closing = ""
            continue
        if array := _ARRAY.match(line):
            name = _plain(array[1])
            lines.setdefault(name, number)
            table = f"{name}.{counts.get(name, 0)}"
            lines[table] = number
            counts[name] = counts.get(name, 0) + 1
        elif header := _TABLE.match(line):
            table = _plain(header[1])
            lines.setdefault(table, number)
        elif pair := _KEY.match(line):
            key = _plain(pair[1])
            lines.setdefault(f"{table}.{key}" if table else key, number)
            closing = next((mark for mark in _MULTILINE if pair[2].count(mark) == 1), "")
    return lines


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
