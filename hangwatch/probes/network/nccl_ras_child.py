"""Asks NCCL's RAS once, for a parent that stays in its own network namespace. Runs by itself, and ends by itself.

Started as `python -I -S nccl_ras_child.py QUESTION`, JSON: the arguments of `asked`. Prints one word
(`answer`, else what went wrong) and a new line, then the answer. Sent are CLIENT PROTOCOL, TIMEOUT, SET FORMAT and
STATUS; never VERBOSE STATUS, which corrupts the memory of NCCL 2.27.3.
"""

import ctypes
import json
import os
import socket
import sys
import time

_CLONE_NEWNET = 0x40000000
_TIMEOUT_SECONDS = 5  # so long RAS waits for a rank that gives no answer
_MOST_LINE_BYTES = 1024


class Connection:
    """A connection with one deadline for all that is said on it. Each call raises OSError; TimeoutError at the end."""

    def __init__(self, address: str, port: int, end: float) -> None:
        self._end = end
        self._socket = socket.create_connection((address, port), timeout=self._left())
        self._rest = b""

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def say(self, line: str) -> None:
        """One command."""
        self._socket.settimeout(self._left())
        self._socket.sendall(f"{line}\n".encode())

    def line(self) -> str:
        """The answer to one command. Raises ValueError where that is no line."""
        while b"\n" not in self._rest:
            part = self._part()
            self._rest += part
            if not part or len(self._rest) > _MOST_LINE_BYTES:
                raise ValueError
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("ascii", "replace")

    def to_the_end(self, most_bytes: int) -> bytes | None:
        """All until the other end closes; None where that is more."""
        parts, count = [self._rest], len(self._rest)
        while part := self._part():
            parts.append(part)
            count += len(part)
            if count > most_bytes:
                return None
        return b"".join(parts)

    def _part(self) -> bytes:
        self._socket.settimeout(self._left())
        return self._socket.recv(1 << 16)


def asked(*, space: int, address: str, port: int, seconds: float, most_bytes: int, form: str) -> tuple[str, bytes]:
    """What RAS answers, and in which way that went.

    `space` is the descriptor of a network namespace, -1: this one; `form` is "text", or "json", where NCCL has that.
    """
    end = time.monotonic() + seconds
    if space >= 0 and ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET) != 0:
        return "not_permitted", os.strerror(ctypes.get_errno()).encode()
    try:
        ras = Connection(address, port, end)
        ras.say("CLIENT PROTOCOL 2")
        if not ras.line().startswith("SERVER PROTOCOL "):
            return "garbage", b""
        ras.say(f"TIMEOUT {_TIMEOUT_SECONDS}")
        if ras.line() != "OK":
            return "garbage", b""
        if form == "json":
            ras.say("SET FORMAT json")
            ras.line()  # before 2.28.7 an error, and the answer is text
        ras.say("STATUS")
        answer = ras.to_the_end(most_bytes)
    except TimeoutError:
        return "no_answer", b""
    except OSError as error:
        return "refused", (error.strerror or str(error)).encode()
    except ValueError:
        return "garbage", b""
    return ("too_large", b"") if answer is None else ("answer", answer)


if __name__ == "__main__":
    how, what = asked(**json.loads(sys.argv[1]))
    sys.stdout.buffer.write(f"{how}\n".encode() + what)
