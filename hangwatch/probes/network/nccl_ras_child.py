"""Ask NCCL's RAS once, in the network namespace of the job. A script.

Started as `python -I -S nccl_ras_child.py QUESTION`; QUESTION is JSON with the arguments of `ask`. It prints one word
(`answer`, or the failure) and a newline, then the answer. It sends CLIENT PROTOCOL, TIMEOUT, SET FORMAT and STATUS. It
never sends VERBOSE STATUS, which corrupts the memory of NCCL 2.27.3.
"""

import ctypes
import json
import os
import socket
import sys
import time

_CLONE_NEWNET = 0x40000000
_TIMEOUT_SECONDS = 5  # time for which RAS waits for a rank
_MOST_LINE_BYTES = 1024


class Connection:
    """A connection with one deadline for all calls. Each call raises OSError, and TimeoutError at the deadline."""

    def __init__(self, address: str, port: int, end: float) -> None:
        self._end = end
        self._socket = socket.create_connection((address, port), timeout=self._remaining_seconds())
        self._buffered = b""

    def _remaining_seconds(self) -> float:
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining

    def send_line(self, line: str) -> None:
        """Send a command."""
        self._socket.settimeout(self._remaining_seconds())
        self._socket.sendall(f"{line}\n".encode())

    def receive_line(self) -> str:
        """Return the reply to a command. Raises ValueError if it is not a line."""
        while b"\n" not in self._buffered:
            part = self._receive()
            self._buffered += part
            if not part or len(self._buffered) > _MOST_LINE_BYTES:
                raise ValueError
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line.decode("ascii", "replace")

    def receive_all(self, most_bytes: int) -> bytes | None:
        """Return everything until the other end closes the connection; None if it exceeds `most_bytes`."""
        parts, count = [self._buffered], len(self._buffered)
        while part := self._receive():
            parts.append(part)
            count += len(part)
            if count > most_bytes:
                return None
        return b"".join(parts)

    def _receive(self) -> bytes:
        self._socket.settimeout(self._remaining_seconds())
        return self._socket.recv(1 << 16)


def ask(*, space: int, address: str, port: int, seconds: float, most_bytes: int, form: str) -> tuple[str, bytes]:
    """Ask RAS. Return the outcome and the answer.

    `space` is the descriptor of a network namespace, -1 for the current one. `form` is "text", or "json" if NCCL
    supports it.
    """
    end = time.monotonic() + seconds
    if space >= 0 and ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET) != 0:
        return "not_permitted", os.strerror(ctypes.get_errno()).encode()
    try:
        ras = Connection(address, port, end)
        ras.send_line("CLIENT PROTOCOL 2")
        if not ras.receive_line().startswith("SERVER PROTOCOL "):
            return "garbage", b""
        ras.send_line(f"TIMEOUT {_TIMEOUT_SECONDS}")
        if ras.receive_line() != "OK":
            return "garbage", b""
        if form == "json":
            ras.send_line("SET FORMAT json")
            ras.receive_line()  # fails before 2.28.7; then the answer is text
        ras.send_line("STATUS")
        answer = ras.receive_all(most_bytes)
    except TimeoutError:
        return "no_answer", b""
    except OSError as error:
        return "refused", (error.strerror or str(error)).encode()
    except ValueError:
        return "garbage", b""
    return ("too_large", b"") if answer is None else ("answer", answer)


if __name__ == "__main__":
    outcome, answer = ask(**json.loads(sys.argv[1]))
    sys.stdout.buffer.write(f"{outcome}\n".encode() + answer)
