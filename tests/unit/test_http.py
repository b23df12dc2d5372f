"""The pages of a real server on loopback, and the access to them."""

import gzip
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from hangwatch.config import Http
from hangwatch.formats.incident_file import Summary
from hangwatch.model import Value
from hangwatch.web import listener
from hangwatch.web.connection_limits import Rate
from hangwatch.web.http_server import PortTakenError, ServeError
from hangwatch.web.listener import MAX_HEADER_BYTES, REQUEST_SECONDS, Answer, Listener, OpenFile, Request, text
from tests.certificates import TLS, client
from tests.commands import finished, first_line, spawn
from tests.conftest import stopping, wait_for
from tests.other_users import as_thread_of, needs_root
from tests.servers import ask_port, served

HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


class Status(Value, frozen=True):
    node: str


class Incidents:
    """A store with one incident, which has one page."""

    def open_file(self, incident_id: str, name: str) -> BinaryIO | None:
        if (incident_id, name) != ("20260101T000000Z-42", "report.html"):
            return None
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the server closes it
        file.write(b"<h1>stacks</h1>")
        file.seek(0)
        return file

    def summaries(self, _of_user=None) -> tuple[Summary, ...]:
        return ()


@contextmanager
def both_ports(
    problem: str | None = None, registry: CollectorRegistry | None = None, **settings: object
) -> Iterator[tuple[int, int]]:
    with served(Status(node="n1"), problem, registry, Incidents(), **settings) as (port, one):
        yield port, one.health_port


@contextmanager
def server(problem: str | None = None, registry: CollectorRegistry | None = None, **settings: object) -> Iterator[int]:
    with both_ports(problem, registry, **settings) as (port, _):
        yield port


def sent(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """Send `request` on a new connection. Return all received bytes until the server closes the connection."""
    with socket.create_connection((host, port), timeout=60) as one:
        one.sendall(request)
        return rest(one)


def rest(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            found += part
    return found


def is_closed(connection: socket.socket) -> bool:
    """True if the server has closed this connection without a response."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.fixture(scope="module")
def pair(pki: Path) -> dict[str, str]:
    (pki / "web.yml").write_text(TLS)
    return {"web_config_file": str(pki / "web.yml")}


def test_metrics_health_and_status() -> None:
    with server() as port:
        status, _, headers = ask_port(port, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        assert ask_port(port, "/healthz")[:2] == (200, b"ok\n")
        assert json.loads(ask_port(port, "/status")[1]) == {"node": "n1"}
        assert ask_port(port, "/")[0] == 200
        assert ask_port(port, "/nothing")[0] == 404
        assert ask_port(port, "/metrics", method="POST")[0] == 405
        assert ask_port(port, "/metrics", method="HEAD")[1] == b""


def test_without_a_token_no_stack_is_served() -> None:
    with server() as port:
        assert ask_port(port, "/incidents/20260101T000000Z-42/report.html")[0] == 404


def test_with_a_token_only_its_holder_sees_stacks(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    page = "/incidents/20260101T000000Z-42/"
    with server(incidents_token_file=str(token)) as port:
        assert ask_port(port, page)[0] == 401
        assert ask_port(port, page, Authorization="Bearer wrong")[0] == 401
        assert ask_port(port, page, Authorization="Bearer é")[0] == 401
        status, body, headers = ask_port(port, page, Authorization="Bearer 0123456789abcdef")
        assert (status, body) == (200, b"<h1>stacks</h1>")
        assert headers["Cache-Control"] == "no-store"
        for other in ("/incidents/../etc/passwd", "/incidents/x/incident.json", f"{page}report.html/"):
            assert ask_port(port, other, Authorization="Bearer 0123456789abcdef")[0] == 404


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortTakenError, match=rf"127\.0\.0\.1:{port}.*\n.*ss -ltnp.*\n.*\[http\] port ="),
            server(port=port),
        ):
            pass


def test_a_port_of_health_in_use_is_named_and_the_other_is_given_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = {"port": free.getsockname()[1], "health_port": taken.getsockname()[1]}
        free.close()
        with pytest.raises(PortTakenError, match=r"health_port = "), both_ports(**ports):
            pass
        socket.create_server(("127.0.0.1", ports["port"])).close()


def test_an_address_that_may_come_later_is_no_error_of_the_configuration() -> None:
    with pytest.raises(PortTakenError, match=r"192\.0\.2\.1"), server(listen="192.0.2.1"):
        pass


def test_huge_headers_are_refused() -> None:
    with server() as port:
        assert ask_port(port, "/metrics", **{"X-Junk": "x" * (MAX_HEADER_BYTES - 1000)})[0] == 200
        assert ask_port(port, "/metrics", **{"X-Junk": "x" * 20000})[0] == 431
        assert sent(port, b"GET /metrics HTTP/1.1\r\nX-Junk: " + b"x" * 200000) == b""
        assert ask_port(port, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "answers"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", [b"200 OK"]),
        (b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", [b"200 OK"]),
        (b"HEAD /healthz HTTP/1.1\r\nHost: a\r\n\r\n", [b"200 OK"]),
        (b"GET /healthz?verbose=1 HTTP/1.1\r\nHost: a\r\n\r\n", [b"200 OK"]),
        # a connection carries one request: later data is not read
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 3, [b"200 OK"]),
        (b"PUT /metrics HTTP/1.1\r\nHost: a\r\n\r\n", [b"405 Method Not Allowed"]),
        (b"HANG /metrics HTTP/1.1\r\nHost: a\r\n\r\n", [b"405 Method Not Allowed"]),
        (b"GET /incidents/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", [b"404 Not Found"]),
        (b"GET /incidents/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", [b"404 Not Found"]),
        (b"GET ///etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", [b"404 Not Found"]),
        # no body is read, whatever its stated length
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", [b"400 Bad Request"]),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", [b"400 Bad Request"]),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", [b"400 Bad Request"]),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\nx", [b"400 Bad Request"]),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [b"400 Bad Request"]),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", [b"400 Bad Request"]),
        (b"no request\r\n\r\n", [b"400 Bad Request"]),
    ],
)
def test_what_is_answered_to_what_may_come(request_bytes: bytes, answers: list[bytes]) -> None:
    with both_ports() as ports:
        for port in ports:
            came = sent(port, request_bytes)
            lines = [line.partition(b" ")[2].strip() for line in came.splitlines() if line.startswith(b"HTTP/1.1 ")]
            assert lines == answers
            if request_bytes.startswith(b"HEAD"):
                assert came.endswith(b"\r\n\r\n")


def test_health_has_a_port_of_its_own_that_says_nothing_else(pair: dict[str, str]) -> None:
    for settings in ({}, pair):
        with both_ports(**settings) as (_, health_port):
            assert ask_port(health_port, "/healthz")[:2] == (200, b"ok\n")
            for path in ("/", "/metrics", "/status", "/incidents/20260101T000000Z-42/"):
                assert ask_port(health_port, path)[0] == 404
    with both_ports("the sampling task has not run for 99 s") as ports:
        for port in ports:
            assert ask_port(port, "/healthz")[:2] == (503, b"the sampling task has not run for 99 s\n")


def test_health_is_beside_the_port_that_was_chosen() -> None:
    for _ in range(10):  # until two ports next to each other are free
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with suppress(PortTakenError), both_ports(port=port) as ports:
            assert ports == (port, port + 1)
            return
    pytest.fail("no two ports are free")


def test_tls_serves_https(pair: dict[str, str], pki: Path, tmp_path: Path) -> None:
    with server(**pair) as port:
        assert ask_port(port, "/healthz", context=client(pki))[0] == 200
        assert b"HTTP" not in sent(port, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    lock = ("openssl", "pkey", "-in", pki / "node-key.pem", "-aes128", "-passout", "pass:secret")
    finished(*lock, "-out", tmp_path / "locked.pem", check=True)
    web_config = tmp_path / "web.yml"
    web_config.write_text(f"tls_server_config:\n  cert_file: {pki}/node.pem\n  key_file: locked.pem\n")
    with pytest.raises(ServeError, match="cannot be used"), server(web_config_file=str(web_config)):
        pass


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_idle_and_slow_clients_do_not_delay_others(tls: bool, pair: dict[str, str], pki: Path) -> None:
    settings = pair if tls else {}
    context = client(pki) if tls else None
    with both_ports(**settings) as (port, health_port):
        idle = [socket.create_connection(("127.0.0.1", where)) for where in (port, health_port) for _ in range(300)]
        for one in idle[::10]:
            with suppress(ConnectionError):
                one.sendall(b"\x16\x03" if tls else b"GET /metrics HTT")
        assert ask_port(port, "/metrics", context=context)[0] == 200
        assert ask_port(health_port, "/healthz")[0] == 200
        for one in idle:
            one.close()


def test_one_more_takes_the_place_of_the_oldest_idle_one() -> None:
    with server(max_connections=16) as port:
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
        crowd.append(socket.create_connection(("127.0.0.1", port)))
        wait_for(lambda: is_closed(crowd[0]), "the oldest to be closed")
        assert [is_closed(one) for one in crowd[1:]] == [False] * 16
        crowd[1].setblocking(True)
        crowd[1].sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert rest(crowd[1]).endswith(b"ok\n")
        for one in crowd:
            one.close()


def test_readers_that_do_not_read_give_their_place_away() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("some", "More than the kernel buffers of a connection hold", ["row"], registry=registry)
    for number in range(200):
        gauge.labels("x" * 50_000 + str(number)).set(1)
    with server(registry=registry, max_connections=16) as port:
        crowd = []
        for _ in range(16):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", port))
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            assert one.recv(8) == b"HTTP/1.1"
            crowd.append(one)
        assert ask_port(port, "/healthz")[0] == 200
        assert len(rest(crowd[0])) < 9_000_000  # the response was cut off
        for one in crowd:
            one.close()


def test_a_request_has_one_deadline_from_accept_to_its_end(pair: dict[str, str]) -> None:
    # The TLS handshake counts towards the deadline. A client that sends single bytes does not extend it.
    def seconds_until_closed(port: int, first: bytes) -> float:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as one, suppress(ConnectionError):
            one.sendall(first)
            while time.monotonic() - began < 4 * REQUEST_SECONDS:
                try:
                    if one.recv(1) == b"":
                        break
                except TimeoutError:
                    if first:
                        one.sendall(b"x")
        return time.monotonic() - began

    with server() as plain, server(**pair) as tls, ThreadPoolExecutor(3) as pool:
        ways = [(plain, b""), (plain, b"GET /metrics HTTP/1.1\r\nX: "), (tls, b"")]
        for seconds in pool.map(lambda way: seconds_until_closed(*way), ways):
            assert REQUEST_SECONDS - 0.5 < seconds < 3 * REQUEST_SECONDS


class Slow(Collector):
    """A metric family that blocks its collection until the event `go` is set. It counts the collections."""

    def __init__(self) -> None:
        self.begun, self.go = 0, threading.Event()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.begun += 1
        self.go.wait(30)
        yield GaugeMetricFamily("slow", "Late", value=1)


def test_scrapes_at_the_same_time_are_one_and_delay_no_other_page() -> None:
    registry, slow = CollectorRegistry(), Slow()
    slow.go.set()
    registry.register(slow)  # collects once, to get the names
    slow.go.clear()
    slow.begun = 0
    with both_ports(registry=registry) as (port, health_port), ExitStack() as stack:
        scrapes = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(20)]
        for scrape in scrapes:
            scrape.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_for(lambda: slow.begun, "a scrape to begin")
        # The server reads requests in the order of their arrival: it has all scrapes when it answers these.
        assert ask_port(port, "/healthz")[0] == ask_port(health_port, "/healthz")[0] == 200
        slow.go.set()
        (page,) = {rest(scrape).partition(b"\r\n\r\n")[2] for scrape in scrapes}
        assert b"slow 1.0" in page
        assert slow.begun < 5


@pytest.mark.parametrize(
    ("accepted", "is_gzipped"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("br, gzip; q=0.000", False),
        ("", False),
    ],
)
def test_metrics_are_compressed_if_the_client_accepts_gzip(accepted: str, is_gzipped: bool) -> None:
    registry = CollectorRegistry()
    watts = Gauge("watts", "power", ["gpu"], registry=registry)
    for index in range(500):
        watts.labels(f"GPU-{index}").set(index)
    with server(registry=registry) as port:
        _, plain, _ = ask_port(port, "/metrics")
        status, body, headers = ask_port(port, "/metrics", **{"Accept-Encoding": accepted})
    assert status == 200
    assert (headers.get("Content-Encoding") == "gzip") == is_gzipped
    assert (gzip.decompress(body) if is_gzipped else body) == plain
    assert len(body) == int(headers["Content-Length"])
    assert not is_gzipped or 4 * len(body) < len(plain)


def test_what_is_compressed_is_what_was_made_last() -> None:
    registry = CollectorRegistry()
    step = Gauge("step", "of a job", registry=registry)

    def shown(port: int) -> bytes:
        return gzip.decompress(ask_port(port, "/metrics", **{"Accept-Encoding": "gzip"})[1])

    with server(registry=registry) as port:
        for number in (1, 2):
            step.set(number)
            wait_for(lambda wanted=number: f"step {wanted}.0" in shown(port).decode(), f"step {number}")  # type: ignore[misc]


def test_metrics_have_one_format_for_every_accept_header() -> None:
    with server() as port:
        for accept in ("text/html;q=0.9,*/*", "application/openmetrics-text;version=1.0.0;escaping=dots,*/*;q=0.1"):
            content_type = ask_port(port, "/metrics", Accept=accept)[2]["Content-Type"]
            assert content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_a_listener_leaves_most_descriptors_to_the_others() -> None:
    async def nothing(_: object) -> Answer:
        raise NotImplementedError

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert Listener("one", nothing, max_connections=30).max_connections == 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert Listener("one", nothing, max_connections=30).max_connections == 25
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("parts", "pause_seconds", "whole"), [(10, 0.4, True), (2, 60.0, False)])
def test_an_answer_from_a_file_has_its_time_again_with_each_part(
    parts: int, pause_seconds: float, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(listener, "RENEWED_BYTES", 1000)
    source, sink = os.pipe()
    file, is_over = FileIO(source), threading.Event()

    def drip() -> None:
        with FileIO(sink, "w") as pipe, suppress(BrokenPipeError):
            for _ in range(parts):
                is_over.wait(pause_seconds)
                pipe.write(b"x" * 1000)

    async def answer(_: object) -> Answer:
        return Answer(HTTPStatus.OK, "text/plain", b"", file=OpenFile(file, 1000 * parts, pool))

    one = Listener("one", answer, max_connections=30)
    port = one.bind("127.0.0.1", 0)
    one.start()
    with ThreadPoolExecutor(2) as pool, stopping(one):
        pool.submit(drip)
        came = sent(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert came.startswith(b"HTTP/1.1 200")
        assert came.endswith(b"x" * 1000 * parts) == whole
        head = sent(port, b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
        is_over.set()
        assert b"Content-Length: %d" % (1000 * parts) in head
        wait_for(lambda: file.closed, "the file to be closed")


WITHOUT_DESCRIPTORS = """
import contextlib, os, resource, sys
from prometheus_client import CollectorRegistry
from hangwatch.config import Http
from hangwatch.web.http_server import Server

one = Server(Http(listen="127.0.0.1", port=0), CollectorRegistry(), status=lambda: None, unhealthy=lambda: None)
print(one.start(), flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
with contextlib.suppress(OSError):
    while True:
        held.append(os.dup(0))
print("full", flush=True)
sys.stdin.readline()
for fd in held:
    os.close(fd)
sys.stdin.read()
print(sum(os.times()[:2]))
os._exit(0)
"""


@contextmanager
def listener_of_five_connections() -> Iterator[tuple[Listener, int]]:
    """Return a listener that is not yet started, and its port. It accepts five connections per caller."""

    async def answer(_: Request) -> Answer:
        return text(HTTPStatus.OK, "here")

    one = Listener("one", answer, max_connections=64, rate=Rate(at_once=5.0, per_second=0.0))
    port = one.bind("127.0.0.1", 0)
    with stopping(one):
        yield one, port


def connected_as(uid: int, address: str, port: int) -> socket.socket:
    """Return a connection from `address` by user `uid`. The thread has this user only while it makes the socket."""
    with as_thread_of(uid):
        ours = socket.socket()
    ours.settimeout(60)
    ours.bind((address, 0))
    ours.connect(("127.0.0.1", port))
    return ours


@needs_root
@pytest.mark.parametrize("addresses", [["127.0.0.1"] * 8, [f"127.0.1.{number}" for number in range(2, 10)]])
def test_user_that_floods_from_loopback_is_refused_and_no_other(addresses: list[str]) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with listener_of_five_connections() as (one, port), ExitStack() as stack:
        one.start()
        answers = []
        for address in addresses:
            ours = stack.enter_context(connected_as(424242, address, port))
            with suppress(ConnectionError):
                ours.sendall(request)
            answers.append(rest(ours)[:15])
        assert answers == [b"HTTP/1.1 200 OK"] * 5 + [b""] * 3
        assert sent(port, request).startswith(b"HTTP/1.1 200 OK"), "another user, from 127.0.0.1"


def test_client_that_has_closed_before_it_is_accepted_costs_no_place() -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with listener_of_five_connections() as (one, port):
        for what in (b"", request):
            for _ in range(10):
                with socket.create_connection(("127.0.0.1", port), timeout=60) as gone:
                    gone.sendall(what)
        one.start()
        assert [sent(port, request)[:15] for _ in range(5)] == [b"HTTP/1.1 200 OK"] * 5


def test_without_a_descriptor_it_waits_and_goes_on() -> None:
    with spawn(sys.executable, "-c", WITHOUT_DESCRIPTORS, stderr=subprocess.PIPE) as running:
        port = int(first_line(running))
        assert first_line(running) == "full"
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as one:
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            with pytest.raises(TimeoutError):
                one.recv(1)
            running.stdin.write("\n")
            running.stdin.flush()
            one.settimeout(60)
            assert rest(one).endswith(b"ok\n")
        _, log = running.communicate(timeout=60)
    assert 0 < log.count("cannot be accepted") < 10, log


def test_server_stops_at_once_despite_open_connections(pair: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    for settings in ({}, pair):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(slow)
        with both_ports(registry=registry, **settings) as ports:
            crowd = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(20)]
            for one in crowd[::2]:
                one.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            if not settings:
                wait_for(lambda: slow.begun, "a scrape to begin")
            began = time.monotonic()
        assert time.monotonic() - began < 20, "the scrape would take 30 s"
        for port in ports:
            socket.create_server(("127.0.0.1", port)).close()
        for one in crowd:
            one.close()
    slow.go.set()
    assert caplog.records == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_wildcard_address_accepts_ipv4_and_ipv6() -> None:
    with server(listen=Http().listen) as port:
        for host in ("127.0.0.1", "::1"):
            assert sent(port, HEALTHZ, host).endswith(b"ok\n")


def test_default_address_without_ipv6_is_that_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with server(listen=Http().listen) as port:
        assert sent(port, HEALTHZ).endswith(b"ok\n")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("::1", port), timeout=60)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(socket.EAI_NONAME, ServeError), (socket.EAI_AGAIN, PortTakenError)],
    ids=["none", "no resolver"],
)
def test_bad_listen_address_is_told(answer: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(answer, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    told = r"listen = 'no\.such\.host\.invalid': not a valid address"
    with pytest.raises(error, match=told), server(listen="no.such.host.invalid"):
        pass
