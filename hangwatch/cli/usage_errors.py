"""Exceptions of the command line."""

from __future__ import annotations

from hangwatch.errors import TemporaryError, UserError


class InputError(UserError):
    """Bad input. The message says what to type instead."""


class MachineError(TemporaryError):
    """A temporary failure of the machine. The same command may succeed later."""
