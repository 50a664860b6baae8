"""The command line; see ``python -m smdlib --help``."""

from smdlib._cli.main import main

__all__ = ["main"]
