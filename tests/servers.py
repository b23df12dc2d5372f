"""Real Prometheus and Alertmanager, and small fake servers: ready when `with` begins, under a deadline."""

import contextlib
import functools
import http.client
import http.server
import json
import os
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import pytest
import yaml
from prometheus_client import CollectorRegistry

from hangwatch import config
from hangwatch.state.status import Status
from hangwatch.web import http_server
from tests.conftest import stopping, wait_for

P = ParamSpec("P")
READY_SECONDS = 60.0
STOP_SECONDS = 10.0


def program(name: str) -> str:
    """Return the path of a system program. If it is missing, skip the test with the name of its Debian package."""
    package = {"prometheus": "prometheus", "promtool": "prometheus", "chromium": "chromium"}
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {package.get(name, 'prometheus-alertmanager')}")
    return found


def chromium(folder: Path, *arguments: str) -> list[str]:
    """Return the command of a headless Chromium with its profile in `folder`."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    profile = f"--user-data-dir={folder / 'chromium'}"
    return [program("chromium"), "--headless", "--disable-gpu", "--hide-scrollbars", *sandbox, profile, *arguments]


def free_port() -> int:
    """Return a loopback port on which no process listens at present.

    The kernel gives no such port to a socket that asks for any: see ip_local_port_range in ip(7). So the port is still
    free when a server of the test starts, or starts again, while other tests open connections.
    """
    while True:
        port = random.randrange(10_000, 29_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket, threading.Event], None], host: str = "127.0.0.2") -> Iterator[int]:
    """Run `serve` on a listening socket in a thread until it sees its event. Yield the port."""
    over = threading.Event()
    with socket.create_server((host, 0)) as listening:
        listening.settimeout(60)

        def run() -> None:
            with contextlib.suppress(OSError):
                serve(listening, over)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def server(
    serve: Callable[Concatenate[socket.socket, threading.Event, P], None],
) -> Callable[P, contextlib.AbstractContextManager[int]]:
    """Decorate a function that serves with a listening socket until an event: a call runs it as `serving` does."""

    @functools.wraps(serve)
    def begin(*given: P.args, **named: P.kwargs) -> contextlib.AbstractContextManager[int]:
        return serving(lambda listening, over: serve(listening, over, *given, **named))

    return begin


@server
def silent_server(listening: socket.socket, over: threading.Event) -> None:
    """Accept connections and never answer; yield the port."""
    listening.settimeout(None)
    with contextlib.ExitStack() as kept:
        while not over.is_set():
            kept.enter_context(listening.accept()[0])


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[bytes]]]:
    """Run a server that handles each connection with `answer`. Yield its port and the list of received requests."""
    came: list[bytes] = []

    def serve(listening: socket.socket, over: threading.Event) -> None:
        listening.settimeout(None)
        while not over.is_set():
            with listening.accept()[0] as one, contextlib.suppress(OSError):
                one.settimeout(60)
                came.append(one.recv(65536))
                answer(one)

    with serving(serve, "127.0.0.1") as port:
        yield port, came


class _Listening:
    """A server on loopback."""

    port: int

    @property
    def address(self) -> str:
        """Return HOST:PORT, as Prometheus' configuration has it."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class _Process(_Listening):
    """A server program that runs inside `with`. At the end it gets SIGTERM, and SIGKILL after a deadline."""

    name = program = ""
    options: tuple[str, ...] = ()
    storage = "--storage.path"

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory, self._config = directory, config
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text(errors="replace")

    def _command(self) -> list[str]:
        path = self.directory / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(dict(self._config)))
        places = [f"--config.file={path}", f"{self.storage}={self.directory / 'data'}"]
        return [
            program(self.program),
            *places,
            f"--web.listen-address={self.address}",
            "--log.level=warn",
            *self.options,
        ]

    def __enter__(self):  # type: ignore[no-untyped-def]
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            wait_for(self._is_ready, f"{self.name} to be ready", READY_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            pytest.fail(f"{self.name} ended with {self._process.returncode}:\n{self.log[-3000:]}")
        with contextlib.suppress(OSError):
            return get(f"{self.url}/-/ready")[0] == 200
        return False

    def stop(self) -> None:
        """Stop the program with SIGTERM; kill it after a deadline."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)


class RealPrometheus(_Process):
    """Debian's Prometheus on a free loopback port.

    `targets` maps `instance` to `host:port`. The job "hangwatch" scrapes all of them. `rules` are rule files.
    `alertmanager` is a `host:port`. `honors_labels`: the labels `job` and `instance` of the scraped series are kept.
    """

    name = program = "prometheus"
    options = ("--storage.tsdb.retention.time=1d",)
    storage = "--storage.tsdb.path"

    def __init__(
        self,
        directory: Path,
        targets: Mapping[str, str],
        *,
        rules: Iterable[Path] = (),
        alertmanager: str | None = None,
        scrape_seconds: float = 1.0,
        evaluate_seconds: float = 1.0,
        honors_labels: bool = False,
    ) -> None:
        config: dict[str, Any] = {
            "global": {
                "scrape_interval": _duration(scrape_seconds),
                "scrape_timeout": _duration(scrape_seconds),
                "evaluation_interval": _duration(evaluate_seconds),
            },
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {
                    "job_name": "hangwatch",
                    "honor_labels": honors_labels,
                    "static_configs": [
                        {"targets": [address], "labels": {"instance": instance}}
                        for instance, address in targets.items()
                    ],
                }
            ],
        }
        if alertmanager:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        super().__init__(directory, config)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query: {"metric": labels, "value": [time, text]} for each series."""
        answer = self.api("query", query=expression)
        return (
            answer["result"]
            if answer["resultType"] in ("vector", "matrix")
            else [{"metric": {}, "value": answer["result"]}]
        )

    def query_range(self, expression: str, seconds: float, step: float = 1.0) -> list[dict[str, Any]]:
        """Return the values over the last `seconds` as series {"metric": labels, "values": [[time, text], ...]}."""
        now = time.time()
        return list(self.api("query_range", query=expression, start=now - seconds, end=now, step=step)["result"])

    def alerts(self, state: str = "firing") -> list[dict[str, Any]]:
        """Return the alerts in state `state`, as listed by Prometheus itself."""
        return [alert for alert in self.api("alerts")["alerts"] if alert["state"] == state]

    def api(self, what: str, **parameters: object) -> Any:
        """Return the `data` of a response of Prometheus' HTTP API. Fail with Prometheus' error if it has one."""
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        status, body = get(url)
        answer = json.loads(body)
        if status != 200 or answer["status"] != "success":
            pytest.fail(f"Prometheus refused {what} {parameters}: {answer.get('error', body)}")
        return answer["data"]


class RealAlertmanager(_Process):
    """Debian's Alertmanager on a free loopback port, with the given configuration."""

    name, program = "alertmanager", "prometheus-alertmanager"
    options = ("--cluster.listen-address=",)

    def post(self, alerts: list[dict[str, Any]]) -> None:
        """Post alerts as Prometheus does."""
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts",
            data=json.dumps(alerts).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def alerts(self) -> list[dict[str, Any]]:
        """Return all alerts that Alertmanager holds, with their status (active, suppressed) and receivers."""
        return list(json.loads(get(f"{self.url}/api/v2/alerts")[1]))


class Server(_Listening):
    """A small HTTP server in a thread of this process, on a free loopback port."""

    def __init__(self) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _respond(self) -> None:
                status, kind, answer = outer.respond(self, self._read_body())
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _read_body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":  # as `kubectl create --raw` sends it
                    return self.rfile.read(int(self.headers.get("Content-Length", "0")))
                body = b""
                while length := int(self.rfile.readline(), 16):
                    body += self.rfile.read(length)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            do_GET = do_POST = do_PATCH = do_DELETE = _respond  # noqa: N815 - names of http.server

            def log_message(self, *_: object) -> None:
                """Log nothing: tests read the received requests instead."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def respond(self, request: http.server.BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        """Return status, content type and body of the response."""
        return self.answer(request.path, body)

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        raise NotImplementedError

    def __enter__(self):  # type: ignore[no-untyped-def]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_SECONDS)


@contextlib.contextmanager
def served(
    status: Status | None = None,
    problem: str | None = None,
    registry: CollectorRegistry | None = None,
    incidents: Any = None,
    **settings: object,
) -> Iterator[tuple[int, http_server.Server]]:
    """Run the web server of a hangwatch with these [http] settings. Yield its port and itself."""
    one = http_server.Server(
        config.Http(**{"listen": "127.0.0.1", "port": 0, **settings}),  # type: ignore[arg-type]
        registry or CollectorRegistry(),
        status=lambda: status,
        unhealthy=lambda: problem,
        incidents=incidents,
    )
    port = one.start()
    with stopping(one):
        yield port, one


class WebhookReceiver(Server):
    """A receiver of Alertmanager's webhook notifications. It keeps them in order, with their unix time of arrival.

    The request path is the receiver's name: `received("/page")` returns the notifications posted to /page.
    """

    def __init__(self) -> None:
        super().__init__()
        self._received: list[tuple[float, str, dict[str, Any]]] = []

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        if body:
            self._received.append((time.time(), path, json.loads(body)))
        return 200, "application/json", b"{}"

    def received(self, path: str = "/") -> list[dict[str, Any]]:
        """Return the notifications posted to this path; each has `received_unix_seconds` added."""
        return [
            {**payload, "received_unix_seconds": when} for when, where, payload in list(self._received) if where == path
        ]

    def wait(self, path: str = "/", status: str = "firing", deadline_seconds: float = 60.0) -> dict[str, Any]:
        """Return the first notification with this status that was posted to this path."""
        return wait_for(
            lambda: next((one for one in self.received(path) if one["status"] == status), None),
            f"a {status} notification at {path}",
            deadline_seconds,
        )


class TextExporter(Server):
    """A server of `text` as /metrics, for metrics that a test cannot cause in a real hangwatch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        return 200, "text/plain; version=0.0.4; charset=utf-8", self.text.encode()


def get(url: str, timeout_seconds: float = 30.0) -> tuple[int, bytes]:
    """Return status and body of a GET, also for an error status."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask_port(
    port: int, path: str, method: str = "GET", context: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Send a request to a port of this machine, by TLS with `context`. Return the status, body and headers."""
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        if context is not None
        else http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    )
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def require_host_name(name: str = socket.gethostname()) -> None:
    """Skip the test if this machine does not know an address of this name. torchrun needs that of its machine."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip(f"needs an address of {name} in /etc/hosts")


def run(*command: str | os.PathLike[str], deadline_seconds: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. The first word of `command` is found as by `program`."""
    first, *rest = command
    return subprocess.run(
        [program(str(first)), *map(str, rest)], capture_output=True, text=True, timeout=deadline_seconds, check=False
    )


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
