"""A minimal client of the Debug Adapter Protocol: runs a waiting program to its next breakpoint."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attach_debugger(port: int) -> Iterator[None]:
    """Attach a debugger and wait for a breakpoint. See microsoft.github.io/debug-adapter-protocol."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as channel, channel.makefile("rb") as incoming:

        def send(number: int, command: str, **arguments: object) -> None:
            message = {"seq": number, "type": "request", "command": command, "arguments": arguments}
            body = json.dumps(message).encode()
            channel.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

        def receive() -> dict[str, Any]:
            length = 0
            while line := incoming.readline().strip():
                length = int(line.partition(b":")[2])
            return json.loads(incoming.read(length))

        def wait_for_event(name: str) -> None:
            while receive().get("event") != name:
                continue

        send(1, "initialize", adapterID="test")
        send(2, "attach", justMyCode=False)
        wait_for_event("initialized")
        send(3, "configurationDone")
        wait_for_event("stopped")
        yield
