"""Compiling every kernel without a GPU: registers, spills and shared memory as a committed table.

`python -m kernels.aot` compiles what differs from the table and checks it; `--write` brings the table up to date.
"""
