"""Telling systemd how the daemon is: the datagram protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

# A full queue of the service manager is waited for this long; then the message is dropped. Never longer than a beat.
_SEND_DEADLINE_SECONDS = 0.5
# Status texts hold job names, which users choose; `systemctl status` shows one line.
_MAX_STATUS_CHARACTERS = 400
_MAX_DIGITS = 20  # of the 64-bit number that systemd writes


@dataclass(frozen=True)
class Notifier:
    """Sends state to the service manager that started this process; without one every call does nothing.

    A message that cannot be delivered is dropped: methods return whether it went out, and raise nothing.
    `watchdog_seconds` is the time to leave between two `watchdog()` calls: half of the unit's WatchdogSec=, as
    sd_watchdog_enabled(3) recommends; None where no watchdog is set, or where it is set for another process.
    """

    address: str | None = None
    watchdog_seconds: float | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; what is malformed counts as absent."""
        return cls(address=_address(environ.get("NOTIFY_SOCKET", "")), watchdog_seconds=_ping_period(environ))

    def ready(self) -> bool:
        """Start-up is over."""
        return self._send("READY=1")

    def status(self, text: str) -> bool:
        """Set the line that `systemctl status` shows; cut to one line of 400 characters."""
        return self._send("STATUS=" + " ".join(text.split())[:_MAX_STATUS_CHARACTERS])

    def watchdog(self) -> bool:
        """Keep-alive: the manager restarts the service when these stop coming."""
        return self._send("WATCHDOG=1")

    def stopping(self) -> bool:
        """Shut-down has begun; from now on TimeoutStopSec= runs."""
        return self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        if self.address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as door:
                door.settimeout(_SEND_DEADLINE_SECONDS)
                door.sendto(message.encode("utf-8", errors="replace"), self.address)
        except (OSError, ValueError):  # ValueError: an address that no socket can have
            return False
        return True


def _address(value: str) -> str | None:
    """The socket's address as Python takes it; '@' stands for the NUL of the abstract namespace (unix(7))."""
    if value.startswith("@") and len(value) > 1:
        return "\0" + value[1:]
    return value if value.startswith("/") else None


def _ping_period(environ: Mapping[str, str]) -> float | None:
    """Half of WATCHDOG_USEC, in seconds; None unless it is a positive number and meant for this process."""
    pid = environ.get("WATCHDOG_PID")
    if pid is not None and pid != str(os.getpid()):
        return None
    timeout = environ.get("WATCHDOG_USEC", "")
    if not (timeout.isascii() and timeout.isdecimal() and len(timeout) <= _MAX_DIGITS):
        return None
    return int(timeout) / 2e6 or None
