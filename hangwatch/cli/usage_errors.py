"""The exceptions of the command line itself."""

from __future__ import annotations

from hangwatch.errors import TemporaryError, UserError


class InputError(UserError):
    """What the user gave cannot be used; the message says what to type instead."""


class MachineError(TemporaryError):
    """What the machine refuses now and may grant later."""
