"""A whole step of a model in one call of a C library, built on this machine. See README.md."""
