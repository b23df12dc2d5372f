"""What the daemon on this node says of itself: /status asked over its port, else over its socket."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from hangwatch import config
from hangwatch.cli.incident_sources import client_of
from hangwatch.cli.usage_errors import InputError, MachineError
from hangwatch.fleet.http_client import WebClient
from hangwatch.formats import decoding, yaml_file
from hangwatch.state.status import Status

STATUS_DEADLINE_SECONDS = 5.0
STATUS_MOST_BYTES = 64 << 20


def answer_of(settings: config.Settings, source: str, url: str | None, http_config: Path | None) -> Any:
    """The answer of /status; over the daemon's socket, with the own jobs, where the port refuses us.

    Raises InputError, and MachineError where the socket refuses for now. `source` is where the settings come
    from. Who says where to ask, or who he is, is taken at his word.
    """
    base = url or _local_url(settings.http)
    try:
        return _fetch(f"{base.rstrip('/')}/status", client_of(http_config))
    except InputError as error:
        if url is not None or http_config is not None:
            raise
        from hangwatch.cli import user_socket_client

        kind: type[Exception]
        try:
            return decoding.plain(user_socket_client.ask(settings.socket.path, "/status"))
        except user_socket_client.SocketError as refused:
            why = str(refused)
            kind = MachineError if isinstance(refused, user_socket_client.BusyError) else InputError
        except (ValueError, RecursionError):
            why, kind = f"{settings.socket.path}: what answers is no hangwatch", InputError
        raise kind(
            f"{error}\n"
            f"  nor over its socket: {why}\n"
            f"  where to ask stands in {source} ([http], [socket]); --config FILE or --url names another place"
        ) from None


def status_of(answer: Any) -> Status:
    """The same as a value. Raises InputError."""
    try:
        return decoding.convert(answer, Status)
    except msgspec.ValidationError as error:
        raise InputError(f"the daemon answers, but not as a hangwatch of this version does: {error}") from None


def _local_url(wanted: config.Http) -> str:
    host = "127.0.0.1" if wanted.listen in ("0.0.0.0", "::", "") else wanted.listen  # noqa: S104 - compared, not bound
    scheme = "https" if wanted.tls_certificate or _has_tls(wanted.web_config_file) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{wanted.port}"


def _has_tls(web_config_file: str) -> bool:
    """Whether it speaks of TLS; its certificates are not ours to read."""
    return bool(web_config_file) and ("tls_server_config",) in yaml_file.read(Path(web_config_file)).lines


def _fetch(url: str, client: WebClient) -> Any:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url}: must start with http:// or https://")
    try:
        content = _content(url, client)
    except urllib.error.HTTPError as error:
        asks = "\n  it asks who you are: --http-config FILE" if error.code in (401, 403) else ""
        raise InputError(f"what answers at {url} refuses: HTTP {error.code}{asks}") from None
    except (OSError, HTTPException, OverflowError) as error:
        raise InputError(
            f"no hangwatch answers at {url}: {getattr(error, 'reason', error)}\n"
            "  is it running? `systemctl status hangwatch`, or start one: `hangwatch run`"
        ) from None
    except ValueError as error:  # no address
        raise InputError(f"--url {url}: {error}") from None
    try:
        return decoding.plain(content)
    except (ValueError, RecursionError):
        raise InputError(f"what answers at {url} is no hangwatch\n  give its address with --url") from None


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: we say who we are to this host alone."""

    def redirect_request(self, *_: Any) -> None:
        """None makes it an error as any other."""


def _content(url: str, client: WebClient) -> bytes:
    """What stands at a URL, up to a bound in bytes and in time, however slowly it comes. Raises OSError."""
    end = time.monotonic() + STATUS_DEADLINE_SECONDS
    content = b""
    headers = {"Authorization": client.authorization} if client.authorization is not None else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - scheme checked by `_fetch`
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=client.tls), _Stay)
    with opener.open(request, timeout=STATUS_DEADLINE_SECONDS) as answer:
        while part := answer.read1(1 << 16):
            content += part
            if len(content) > STATUS_MOST_BYTES:
                raise OSError(f"its answer is longer than {STATUS_MOST_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise OSError(f"its answer takes longer than {STATUS_DEADLINE_SECONDS:g} s")
    return content
