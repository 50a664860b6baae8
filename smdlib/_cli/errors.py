"""Errors that are the reader's to mend, told without a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A command that cannot be run; the message says why and what to do."""
