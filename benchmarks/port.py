"""Effect of hostile clients of the daemon's port on scrapes, over plain HTTP and over TLS.

    sudo .venv/bin/python benchmarks/port.py [--idle 1000] [--slow 50] [--requests 40] [--series 2000]

The server of the daemon runs alone in a separate process. Three kinds of hostile connections are on its port and on
its health port. Some send nothing, and are replaced when the server closes them. Some send a byte a second. Some
request /metrics and read a byte a second. Meanwhile the benchmark requests /metrics and the health page in turn.
The hostile clients are another user, because the server limits the connections of each local user: needs root.
The result is the median and maximum of their latencies, and memory, descriptors and CPU of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import selectors
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from prometheus_client import CollectorRegistry, Gauge  # noqa: E402

from hangwatch.config import Http  # noqa: E402
from hangwatch.web.http_server import Server  # noqa: E402
from tests.conftest import wait_for  # noqa: E402

REOPENED = 100  # connections a second
NOBODY = 65534
WRONG = float("inf")  # no response, or a status other than 200


class Crowd:
    """A process with hostile connections to one port. It replaces closed connections, at most REOPENED a second."""

    def __init__(self, port: int, *, idle: int, slow: int, context: ssl.SSLContext | None) -> None:
        self._address, self._context = ("127.0.0.1", port), context
        self._wanted = {"idle": idle, "slow sender": slow, "slow reader": slow}
        self._open: dict[socket.socket, str] = {}
        self._opened = multiprocessing.Value("i", 0)
        self._end = multiprocessing.Event()
        self._process = multiprocessing.get_context("fork").Process(target=self._run, daemon=True)

    def __enter__(self) -> Crowd:
        self._process.start()
        wait_for(lambda: self.opened >= sum(self._wanted.values()), "the crowd to come", 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._process.join()

    @property
    def opened(self) -> int:
        return self._opened.value

    def _run(self) -> None:
        os.setuid(NOBODY)
        selector, next_byte, began = selectors.DefaultSelector(), 0.0, time.monotonic()
        while not self._end.is_set():
            for key, _ in selector.select(0.01):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if self._open[one] == "slow reader":
                    continue  # this kind reads together with the next byte
                with contextlib.suppress(OSError):
                    if one.recv(1000):
                        continue
                self._drop(selector, one)
            counted = list(self._open.values())
            allowed = sum(self._wanted.values()) + REOPENED * (time.monotonic() - began)
            for kind, wanted in self._wanted.items():
                for _ in range(min(10, wanted - counted.count(kind), int(allowed) - self.opened)):
                    self._add(selector, kind)
            if time.monotonic() >= next_byte:
                next_byte = time.monotonic() + 1
                for one, kind in list(self._open.items()):
                    if kind != "idle":
                        try:
                            one.recv(1) if kind == "slow reader" else one.send(b"X")
                        except BlockingIOError:
                            pass
                        except OSError:
                            self._drop(selector, one)

    def _add(self, selector: selectors.BaseSelector, kind: str) -> None:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.settimeout(5)
        try:
            one.connect(self._address)
            if self._context is not None and kind != "idle":
                one = self._context.wrap_socket(one, server_hostname="localhost")
            if kind != "idle":
                one.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + (b"\r\n" if kind == "slow reader" else b""))
        except OSError:
            one.close()
            return
        one.setblocking(False)
        self._open[one] = kind
        self._opened.value += 1
        if kind != "slow reader":
            selector.register(one, selectors.EVENT_READ)

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection)
        del self._open[connection]
        connection.close()


def latency(port: int, path: str, context: ssl.SSLContext | None, deadline: float) -> float:
    """Return the seconds from connect to the last byte. Return WRONG if there is no response with status 200."""
    began = time.monotonic()
    door = (
        HTTPSConnection("127.0.0.1", port, timeout=deadline, context=context)
        if context is not None
        else HTTPConnection("127.0.0.1", port, timeout=deadline)
    )
    with contextlib.closing(door), contextlib.suppress(OSError, HTTPException):
        door.request("GET", path)
        answer = door.getresponse()
        answer.read()
        if answer.status == 200:
            return time.monotonic() - began
    return WRONG


def format_latencies(name: str, seconds: list[float]) -> str:
    failed = seconds.count(WRONG)
    return f"{name} {statistics.median(seconds) * 1000:7.0f} {max(seconds) * 1000:8.0f}" + (
        f"  ({failed} of {len(seconds)} not answered)" if failed else ""
    )


def row(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(folder: Path, tls: bool, series: int) -> Iterator[tuple[int, int, int, ssl.SSLContext | None]]:
    """Start the server. Yield its pid, its port, its health port, and the TLS context of a client.

    The health port is 0 if there is none. The context is None without TLS.
    """
    web_config, context = "", None
    if tls:
        web_config = str(folder / "web.yml")
        Path(web_config).write_text("tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1",
             "-out", str(folder / "cert.pem"), "-keyout", str(folder / "key.pem")],
            capture_output=True, check=True,
        )  # fmt: skip
        context = ssl.create_default_context(cafile=folder / "cert.pem")
        context.check_hostname = False
    command = [sys.executable, __file__, "--series", str(series), "--serve", web_config]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        port, health_port = map(int, running.stdout.readline().split())
        yield running.pid, port, health_port, context
        running.communicate()


def serve(series: int, web_config: str) -> None:
    """Serve `series` series until standard input ends. Print the port and the health port (0 if there is none)."""
    registry = CollectorRegistry()
    gauge = Gauge(
        "some", "So many series of the size that a rank has", ["job_id", "job_key", "rank"], registry=registry
    )
    for rank in range(series):
        gauge.labels("pretrain-4711", "0123456789ab", rank).set(rank)
    one = Server(
        Http(listen="127.0.0.1", port=0, web_config_file=web_config),
        registry,
        status=lambda: None,
        unhealthy=lambda: None,
    )
    print(one.start(), getattr(one, "health_port", 0), flush=True)
    sys.stdin.read()
    one.stop()


def measure(chosen: argparse.Namespace, tls: bool) -> bool:
    """Print the latencies. Return True if the server answered each request."""
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder), tls, chosen.series) as (pid, port, health_port, context),
    ):
        own = None if health_port else context  # releases without a port for health serve it on the other
        latency(port, "/metrics", context, chosen.deadline)
        before = row(pid, "VmRSS")
        alone = [latency(port, "/metrics", context, chosen.deadline) for _ in range(chosen.requests)]
        crowds = [Crowd(port, idle=chosen.idle, slow=chosen.slow, context=context)]
        if health_port:
            crowds.append(Crowd(health_port, idle=chosen.idle, slow=chosen.slow, context=None))
        with contextlib.ExitStack() as stack:
            for crowd in crowds:
                stack.enter_context(crowd)
            used, began, peak, fds = cpu_seconds(pid), time.monotonic(), 0, 0
            metrics, health = [], []
            for _ in range(chosen.requests):
                metrics.append(latency(port, "/metrics", context, chosen.deadline))
                health.append(latency(health_port or port, "/healthz", own, chosen.deadline))
                peak = max(peak, row(pid, "VmRSS"))
                fds = max(fds, len(list(Path(f"/proc/{pid}/fd").iterdir())))
            used, wall = cpu_seconds(pid) - used, time.monotonic() - began
    print(f"{'TLS' if tls else 'plain'}, {chosen.idle} idle, {chosen.slow} slow senders, {chosen.slow} slow readers")
    print("  latency, ms        median      max")
    print(format_latencies("  /metrics alone  ", alone))
    print(format_latencies("  /metrics        ", metrics))
    print(format_latencies("  health          ", health))
    print(f"  resident memory {before / 1024:.1f} MiB before, {peak / 1024:.1f} MiB at most; {fds} descriptors")
    opened = sum(crowd.opened for crowd in crowds)
    print(f"  {100 * used / wall:.0f} % of a core; {opened} hostile connections in {wall:.0f} s", flush=True)
    return WRONG not in (*alone, *metrics, *health)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--idle", type=int, default=1000)
    options.add_argument("--slow", type=int, default=50)
    options.add_argument("--requests", type=int, default=40)
    options.add_argument("--deadline", type=float, default=10.0, help="seconds until a request counts as not answered")
    options.add_argument("--series", type=int, default=2000)
    options.add_argument("--serve", metavar="WEB_CONFIG", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.serve is not None:
        serve(chosen.series, chosen.serve)
        return 0
    if os.geteuid() != 0:
        options.error("run it as root: its hostile clients are another user")
    are_answered = [measure(chosen, tls) for tls in (False, True)]
    return int(not all(are_answered))


if __name__ == "__main__":
    sys.exit(main())
