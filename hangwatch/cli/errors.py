"""Which exceptions are answers to the user (exit 2), not bugs of ours."""

from __future__ import annotations

from hangwatch.checks.discovery import ContractError, UnknownCheckError
from hangwatch.config import ConfigError
from hangwatch.demo.node import NodeError
from hangwatch.http import ServeError
from hangwatch.store import StoreError


class InputError(Exception):
    """What the user gave cannot be used; the message says what to type instead."""


class MachineError(Exception):
    """What the machine refuses now and may grant later: after exit 2 systemd would not start the daemon again."""


USER_ERRORS = (InputError, ConfigError, StoreError, ServeError, UnknownCheckError, ContractError, NodeError)
