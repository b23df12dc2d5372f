"""The client for /status of the daemon on this node: over its HTTP port, else over its user socket."""

import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

import msgspec

from hangwatch import config, words
from hangwatch.cli.usage_errors import InputError
from hangwatch.formats import decoding
from hangwatch.state.status import Status

STATUS_DEADLINE_SECONDS = 5.0
STATUS_MOST_BYTES = 64 << 20


def fetch_status(settings: config.Settings, source: str, url: str | None) -> Any:
    """Return the decoded JSON of /status from the daemon's HTTP port.

    If that fails, for example because the port requires credentials, and `url` is not given, query the user socket.
    Its reply has only this user's jobs. Errors name `source`, the source of the settings. Raises InputError and
    SocketError: BusyError if the socket refuses for now.
    """
    base = url or _local_url(settings.http)
    try:
        return _fetch(base.rstrip("/").removesuffix("/status"))
    except InputError as error:
        if url is not None:
            raise
        from hangwatch.cli import user_socket_client

        try:
            return decoding.decode_plain_json(user_socket_client.ask(settings.socket.path, "/status"))
        except user_socket_client.SocketError as refused:
            problem = refused
        except (ValueError, RecursionError):
            foreign = f"{settings.socket.path}: the program that answers is not hangwatch"
            problem = user_socket_client.SocketError(foreign)
        raise type(problem)(
            f"{error}\n"
            f"  nor over the user socket: {problem}\n"
            f"  the addresses are from {source} ([http], [socket]); --config FILE or --url selects others"
        ) from None


def decode_status(answer: Any) -> Status:
    """Convert the result of `fetch_status` to a Status. Raises InputError."""
    try:
        return decoding.convert(answer, Status)
    except msgspec.ValidationError as error:
        raise InputError(f"the daemon is of another version of hangwatch; its answer cannot be read: {error}") from None


def _local_url(http: config.Http) -> str:
    host = "127.0.0.1" if http.listen in ("0.0.0.0", "::", "") else http.listen  # noqa: S104 - compared, not bound
    return f"http://{words.place(host, http.port)}"


def _fetch(url: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url}: must start with http:// or https://\n  try --url http://{url}")
    try:
        content = _content(f"{url}/status")
    except urllib.error.HTTPError as error:
        advice = "\n  it requires credentials: run this command on its node" if error.code in (401, 403) else ""
        raise InputError(f"{url} refused the request: HTTP {error.code}{advice}") from None
    except (OSError, HTTPException, OverflowError) as error:
        raise InputError(
            f"the daemon does not respond at {url}: {getattr(error, 'reason', error)}\n"
            "  is it running? `systemctl status hangwatch`, or start it: `hangwatch run`"
        ) from None
    except ValueError as error:  # a bad URL
        raise InputError(f"--url {url}: {error}") from None
    try:
        return decoding.decode_plain_json(content)
    except (ValueError, RecursionError):
        raise InputError(f"the program that answers at {url} is not hangwatch\n  give its address: --url") from None


def _content(url: str) -> bytes:
    """Return the content of a URL. Raises OSError, also if the content is too large or takes too long."""
    end = time.monotonic() + STATUS_DEADLINE_SECONDS
    content = b""
    with urllib.request.urlopen(url, timeout=STATUS_DEADLINE_SECONDS) as answer:  # noqa: S310 - scheme is checked
        while part := answer.read1(1 << 16):
            content += part
            if len(content) > STATUS_MOST_BYTES:
                raise OSError(f"its answer is longer than {STATUS_MOST_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise OSError(f"its answer took longer than {STATUS_DEADLINE_SECONDS:g} s")
    return content
