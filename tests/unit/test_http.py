"""What is served to whom, by a real server on loopback."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from hangwatch.config import Http
from hangwatch.http import ServeError, Server
from hangwatch.model import Value
from tests.conftest import wait_for


class Answer(Value, frozen=True):
    node: str


class Incidents:
    def read_file(self, incident_id: str, name: str) -> bytes | None:
        return b"<h1>stacks</h1>" if (incident_id, name) == ("20260101T000000Z-42", "report.html") else None


@contextmanager
def server(problem: str | None = None, **settings: object) -> Iterator[int]:
    one = Server(
        Http(listen="127.0.0.1", port=0, **settings),  # type: ignore[arg-type]
        CollectorRegistry(),
        status=lambda: Answer(node="n1"),
        unhealthy=lambda: problem,
        incidents=Incidents(),
    )
    port = one.start()
    try:
        yield port
    finally:
        one.stop()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_metrics_health_and_status() -> None:
    with server() as port:
        status, _, headers = get(port, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        assert get(port, "/healthz")[:2] == (200, b"ok\n")
        assert json.loads(get(port, "/status")[1]) == {"node": "n1"}
        assert get(port, "/")[0] == 200
        assert get(port, "/nothing")[0] == 404
        assert get(port, "/metrics", method="POST")[0] == 405
        assert get(port, "/metrics", method="HEAD")[1] == b""


def test_an_unhealthy_daemon_says_so() -> None:
    with server("no beat for 99 s") as port:
        assert get(port, "/healthz")[:2] == (503, b"no beat for 99 s\n")


def test_without_a_token_no_stack_is_served() -> None:
    with server() as port:
        assert get(port, "/incidents/20260101T000000Z-42/report.html")[0] == 404


def test_with_a_token_only_its_holder_sees_stacks(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    page = "/incidents/20260101T000000Z-42/"
    with server(incidents_token_file=str(token)) as port:
        assert get(port, page)[0] == 401
        assert get(port, page, Authorization="Bearer wrong")[0] == 401
        assert get(port, page, Authorization="Bearer é")[0] == 401
        status, body, headers = get(port, page, Authorization="Bearer 0123456789abcdef")
        assert (status, body) == (200, b"<h1>stacks</h1>")
        assert headers["Cache-Control"] == "no-store"
        for other in ("/incidents/../etc/passwd", "/incidents/x/incident.json", "/incidents/"):
            assert get(port, other, Authorization="Bearer 0123456789abcdef")[0] == 404


@pytest.mark.parametrize(("content", "word"), [(None, "No such file"), ("short", "shorter than 16")])
def test_a_bad_token_file_is_told(tmp_path: Path, content: str | None, word: str) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    with pytest.raises(ServeError, match=word), server(incidents_token_file=str(token)):
        pass


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = Server(
            Http(listen="127.0.0.1", port=port), CollectorRegistry(), status=lambda: None, unhealthy=lambda: None
        )
        with pytest.raises(ServeError, match=rf"127\.0\.0\.1:{port}.*\n.*ss -ltnp"):
            one.start()


def test_half_requests_do_not_block_others() -> None:
    with server(threads=2) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(1)]
        for one in idle:
            one.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert get(port, "/healthz")[0] == 200
        for one in idle:
            one.close()


def test_huge_headers_are_refused() -> None:
    with server() as port:
        assert get(port, "/metrics", **{"X-Junk": "x" * 20000})[0] in (400, 413)
        wait_for(lambda: get(port, "/healthz")[0] == 200, "the server to go on")


def test_tls_serves_https(tmp_path: Path) -> None:
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1",
         "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is not installed")
    import ssl

    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    context.check_hostname = False
    pair = {"tls_certificate": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    with server(**pair) as port:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
    with pytest.raises(ServeError, match="go together"), server(tls_certificate="x"):
        pass


def test_a_listen_address_that_is_none_is_told() -> None:
    one = Server(
        Http(listen="no.such.host.invalid", port=0), CollectorRegistry(), status=lambda: None, unhealthy=lambda: None
    )
    with pytest.raises(ServeError, match=r"listen = 'no\.such\.host\.invalid' is no address"):
        one.start()
