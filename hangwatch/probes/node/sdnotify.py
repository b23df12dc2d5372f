"""Report the daemon's state to systemd with the datagram protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

# Longest wait for a full queue of the service manager; then the message is dropped. Must be shorter than a tick.
_SEND_DEADLINE_SECONDS = 0.5
# Status texts hold job names, which users choose; `systemctl status` shows one line.
_MAX_STATUS_CHARACTERS = 400
_MAX_DIGITS = 20  # of the 64-bit number that systemd writes


@dataclass(frozen=True)
class Notifier:
    """A sender of the daemon's state to the service manager. Without a service manager every call does nothing.

    Methods raise nothing, and return False if the message could not be delivered. `watchdog_seconds` is the time
    between two `watchdog()` calls: half of the unit's WatchdogSec=, as sd_watchdog_enabled(3) recommends. It is None
    without a watchdog for this process.
    """

    address: str | None = None
    watchdog_seconds: float | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID. A malformed value counts as absent."""
        return cls(address=_address(environ.get("NOTIFY_SOCKET", "")), watchdog_seconds=_ping_period(environ))

    def ready(self) -> bool:
        """Report that the start is complete."""
        return self._send("READY=1")

    def status(self, text: str) -> bool:
        """Set the line that `systemctl status` shows, cut to 400 characters."""
        return self._send("STATUS=" + " ".join(text.split())[:_MAX_STATUS_CHARACTERS])

    def watchdog(self) -> bool:
        """Send a keep-alive message. The service manager restarts the service when the messages stop."""
        return self._send("WATCHDOG=1")

    def stopping(self) -> bool:
        """Report that the shutdown has begun. systemd's timeout TimeoutStopSec= starts now."""
        return self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        if self.address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(_SEND_DEADLINE_SECONDS)
                channel.sendto(message.encode("utf-8", errors="replace"), self.address)
        except (OSError, ValueError):  # ValueError: an address that no socket can have
            return False
        return True


def _address(value: str) -> str | None:
    """Return the socket's address for Python. '@' means the NUL byte of the abstract namespace (unix(7))."""
    if value.startswith("@") and len(value) > 1:
        return "\0" + value[1:]
    return value if value.startswith("/") else None


def _ping_period(environ: Mapping[str, str]) -> float | None:
    """Return half of WATCHDOG_USEC, in seconds; None unless it is positive and meant for this process."""
    pid = environ.get("WATCHDOG_PID")
    if pid is not None and pid != str(os.getpid()):
        return None
    timeout = environ.get("WATCHDOG_USEC", "")
    if not (timeout.isascii() and timeout.isdecimal() and len(timeout) <= _MAX_DIGITS):
        return None
    return int(timeout) / 2e6 or None
