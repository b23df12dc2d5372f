"""Which exceptions are answers to the user and no bugs of ours: each room derives its own from these."""

from __future__ import annotations


class UserError(Exception):
    """What the user gave cannot be used, or the machine is not set up: the message says what to type (exit code 2)."""


class TemporaryError(Exception):
    """What may pass by itself: after exit code 75 systemd starts the daemon again, which it does not after 2."""
