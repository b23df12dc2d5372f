"""Notifications to the service manager, on a real datagram socket."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.probes.node.sdnotify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.settimeout(5)
        door.bind(str(tmp_path / "notify"))
        yield door


def notifier(manager: socket.socket) -> Notifier:
    return Notifier.from_environ({"NOTIFY_SOCKET": manager.getsockname()})


def test_notifications_arrive_in_order(manager: socket.socket) -> None:
    service = notifier(manager)
    sent = [
        service.ready(),
        service.status("2 jobs, 8 GPUs"),
        service.watchdog(),
        service.stopping(),
    ]
    assert sent == [True] * 4
    assert [manager.recv(4096) for _ in sent] == [b"READY=1", b"STATUS=2 jobs, 8 GPUs", b"WATCHDOG=1", b"STOPPING=1"]


def test_an_abstract_socket_is_reached() -> None:
    name = f"hangwatch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.settimeout(5)
        door.bind("\0" + name)
        assert Notifier.from_environ({"NOTIFY_SOCKET": "@" + name}).ready()
        assert door.recv(64) == b"READY=1"


@given(st.text())
def test_status_text_cannot_add_another_field(text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.settimeout(5)
        door.bind("")  # autobind: the kernel picks an abstract name
        address = "@" + os.fsdecode(door.getsockname()[1:])
        assert Notifier.from_environ({"NOTIFY_SOCKET": address}).status(text)
        received = door.recv(65536)
    assert received.startswith(b"STATUS=")
    assert b"\n" not in received
    assert len(received.decode()) <= len("STATUS=") + 400


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "@"}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_notifier_without_a_socket_does_nothing(environ: dict[str, str]) -> None:
    service = Notifier.from_environ(environ)
    assert service == Notifier(address=None, watchdog_seconds=None)
    assert [service.ready(), service.status("x"), service.watchdog(), service.stopping()] == [False] * 4


def test_notifier_with_an_invalid_socket_returns_false(tmp_path: Path) -> None:
    stream = str(tmp_path / "stream")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(stream)
        for address in (str(tmp_path / "gone"), "/" + "x" * 500, str(tmp_path), stream, "/\udcff\ud800"):
            assert Notifier.from_environ({"NOTIFY_SOCKET": address}).ready() is False


def test_notification_to_a_full_queue_is_dropped(manager: socket.socket) -> None:
    service = notifier(manager)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            for _ in range(100_000):
                other.sendto(b"x", manager.getsockname())
    start = time.monotonic()
    assert service.watchdog() is False
    assert time.monotonic() - start < 10


def test_no_descriptor_is_left_open(manager: socket.socket) -> None:
    service = notifier(manager)
    before = len(list(Path("/proc/self/fd").iterdir()))
    service.ready()
    Notifier.from_environ({"NOTIFY_SOCKET": "/nowhere"}).ready()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_ping_period_is_half_of_the_timeout() -> None:
    assert Notifier.from_environ({"WATCHDOG_USEC": "30000000"}).watchdog_seconds == 15.0
    mine = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert Notifier.from_environ(mine).watchdog_seconds == 15.0


def test_watchdog_of_another_process_is_ignored() -> None:
    assert Notifier.from_environ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_seconds is None


@pytest.mark.parametrize("timeout", ["", "0", "-5", "1.5", "30s", "٣", "9" * 400, "9" * 5000])
def test_malformed_timeout_disables_the_watchdog(timeout: str) -> None:
    assert Notifier.from_environ({"WATCHDOG_USEC": timeout}).watchdog_seconds is None
