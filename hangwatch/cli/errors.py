"""Which exceptions are answers to the user, not bugs of ours: what is wrong (exit 2), and what may pass (exit 75)."""

from __future__ import annotations

from hangwatch.checks.discovery import ContractError, UnknownCheckError
from hangwatch.config import ConfigError
from hangwatch.demo.node import NodeError
from hangwatch.fleet.nodeset import NodesError
from hangwatch.http import PortTakenError, ServeError
from hangwatch.incident_file import StoreError
from hangwatch.store import StoreTakenError


class InputError(Exception):
    """What the user gave cannot be used; the message says what to type instead."""


class MachineError(Exception):
    """What the machine refuses now and may grant later: after exit 2 systemd would not start the daemon again."""


USER_ERRORS = (InputError, ConfigError, StoreError, ServeError, UnknownCheckError, ContractError, NodeError, NodesError)
TEMPORARY_ERRORS = (MachineError, PortTakenError, StoreTakenError)
