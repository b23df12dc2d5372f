"""Download of incidents from the daemons of many nodes, in parallel. Replies are not trusted: they may be huge.

Redirects are not followed, and nothing is decompressed. All requests to one node share one deadline.
"""

import asyncio
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.iostream import UnsatisfiableReadError
from tornado.simple_httpclient import HTTPStreamClosedError, SimpleAsyncHTTPClient

from hangwatch.errors import UserError
from hangwatch.formats import decoding
from hangwatch.formats.incident_file import Incidents, Summary
from hangwatch.tools.fleet.http_client import WebClient
from hangwatch.tools.fleet.remote_run import FANOUT, MOST_ANSWER_BYTES, Progress, Reply

MOST_LIST_BYTES = 4 << 20  # 4,096 incidents take a third of it
MOST_OF_A_NODE = 16  # incidents that are fetched from one node
MAX_HEADER_BYTES = 64 << 10
MOST_URL_CHARACTERS = 2000
_SHOWN_CHARACTERS = 200
_INCIDENT = re.compile(r"(?P<base>.*?)/incidents(?:/(?P<incident>[A-Za-z0-9._-]{1,200})(?:/[A-Za-z0-9._-]*)?)?/?")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_REFUSED: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "requires credentials: --http-config FILE with basic_auth or authorization",
    HTTPStatus.FORBIDDEN: "requires another client certificate: --http-config FILE with tls_config",
    HTTPStatus.NOT_FOUND: "has no such incident, or serves none: see [http] web_config_file of that node",
    HTTPStatus.TOO_MANY_REQUESTS: "is checking too many passwords: try again in a minute",
}


class AddressError(UserError):
    """A URL that is invalid or not supported. The message gives the reason."""


class FetchError(Exception):
    """A response of a node without the requested data. The message gives the reason."""


class Site(NamedTuple):
    """The address of a node's daemon. `base` is the URL to which the paths of its pages are added.

    `incident` is the name of the requested incident; None: `choose_incidents` selects the incidents.
    """

    node: str
    base: str
    incident: str | None = None


def parse_url(url: str) -> Site:
    """Parse the URL of a daemon or of one of its incidents. The site's name is `HOST:PORT`. Raises AddressError."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError as error:
        raise AddressError(f"{url[:80]!r}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise AddressError(
            "a URL contains a password, which all users of this machine can read: use --http-config FILE instead"
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise AddressError(f"{url[:80]!r}: must be http(s)://HOST:PORT of a daemon, or the URL of one of its incidents")
    if len(url) > MOST_URL_CHARACTERS or not (url.isascii() and url.isprintable()) or " " in url:
        raise AddressError(f"{url[:80]!r}: is not a valid URL")
    of_incident = _INCIDENT.fullmatch(parts.path)
    path = of_incident["base"] if of_incident else parts.path.rstrip("/")
    incident = of_incident["incident"] if of_incident else None
    shown = f"[{host}]" if ":" in host else host
    return Site(node=f"{shown}{port}", base=f"{parts.scheme}://{shown}{port}{path}", incident=incident)


def shorten_names(sites: Sequence[Site]) -> list[Site]:
    """Return the sites with the host as name. If other sites have the same host, the name keeps the port."""
    hosts = [re.sub(r":[0-9]+$", "", one.node).strip("[]") for one in sites]
    bases = {host: {one.base for one, other in zip(sites, hosts, strict=True) if other == host} for host in set(hosts)}
    return [one._replace(node=host) if len(bases[host]) == 1 else one for one, host in zip(sites, hosts, strict=True)]


def fetch(
    sites: Sequence[Site],
    client: WebClient,
    *,
    wanted: str | None,
    deadline_seconds: float,
    on_reply: Callable[[Reply], object],
    on_failure: Callable[[str, str], None],
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Download the incidents from all sites. Pass each incident to `on_reply` when it arrives.

    `wanted` is the id, key or name of a job; None: all jobs with an open incident, or the newest incident if none
    is open. A node without such an incident has no reply. A node that cannot be reached or does not respond within
    `deadline_seconds` has a reply with `is_late`. For any other error, `on_failure` is called with the node and the
    reason.
    """
    asyncio.run(_Fetching(client, wanted, deadline_seconds, on_reply, on_failure).all(sites, on_progress))


def page(url: str, client: WebClient, *, most_bytes: int, deadline_seconds: float) -> bytes:
    """Return the content of a URL. Raises FetchError, and TimeoutError if the server does not respond in time."""
    try:
        return asyncio.run(asyncio.wait_for(_page(url, client, most_bytes, deadline_seconds), deadline_seconds))
    except asyncio.TimeoutError as error:  # not the built-in TimeoutError in Python 3.10
        raise TimeoutError(str(error) or f"no response within {deadline_seconds:g} s") from None


class _Fetching(NamedTuple):
    """The requests of one `fetch` to many nodes."""

    client: WebClient
    wanted: str | None
    deadline_seconds: float
    on_reply: Callable[[Reply], object]
    on_failure: Callable[[str, str], None]

    async def all(self, sites: Sequence[Site], on_progress: Callable[[Progress], None]) -> None:
        began = time.monotonic()
        slots = asyncio.Semaphore(FANOUT)
        asking = [asyncio.create_task(self._one(one, slots)) for one in sites]
        try:
            for ended, done in enumerate(asyncio.as_completed(asking), 1):
                await done
                on_progress(Progress(ended, len(sites), time.monotonic() - began))
        finally:
            for task in asking:
                task.cancel()

    async def _one(self, site: Site, slots: asyncio.Semaphore) -> None:
        async with slots:
            asked = time.time()
            try:
                await asyncio.wait_for(self._of_node(site), self.deadline_seconds)
            except FetchError as error:
                self.on_failure(site.node, str(error))
            except (TimeoutError, asyncio.TimeoutError):
                self.on_reply(Reply(site.node, b"", None, asked, time.time(), is_late=True))

    async def _of_node(self, site: Site) -> None:
        names = [site.incident] if site.incident is not None else await self._newest(site)
        for name in names:
            asked = time.time()
            url = f"{site.base}/incidents/{name}/grouped.json"
            body = await _page(url, self.client, MOST_ANSWER_BYTES, self.deadline_seconds)
            self.on_reply(Reply(site.node, body, 0, asked, time.time()))

    async def _newest(self, site: Site) -> list[str]:
        """Read the list of incidents of a node. Return the names of the incidents to download. Raises FetchError."""
        body = await _page(f"{site.base}/incidents", self.client, MOST_LIST_BYTES, self.deadline_seconds)
        try:
            listed = decoding.decode_json(body, Incidents).incidents
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise FetchError("returned no list of incidents: is it a hangwatch daemon?") from None
        return choose_incidents(listed, self.wanted)


def choose_incidents(listed: Sequence[Summary], wanted: str | None) -> list[str]:
    """Return the folders of a node's incidents to download: the newest of each job that `wanted` selects."""
    readable = [one for one in listed if not one.problem and _FOLDER.fullmatch(one.folder)]
    newest_first = sorted(readable, key=lambda one: (one.opened_unix_seconds, one.folder), reverse=True)
    if wanted is not None:
        meant = [one for one in newest_first if wanted and wanted in (one.job_key, one.job_id, one.job_name)]
    else:
        meant = [one for one in newest_first if one.closed_unix_seconds is None] or newest_first[:1]
    of_job: dict[str, str] = {}
    for one in meant:
        of_job.setdefault(one.job_key or one.job_id, one.folder)
    return list(of_job.values())[:MOST_OF_A_NODE]


async def _page(url: str, client: WebClient, most_bytes: int, deadline_seconds: float) -> bytes:
    """Return the content of a URL. Raises FetchError, and TimeoutError if the server does not respond."""
    logging.getLogger("tornado").setLevel(logging.CRITICAL)  # hangwatch reports invalid responses itself
    connection = SimpleAsyncHTTPClient(
        force_instance=True,
        max_buffer_size=most_bytes + MAX_HEADER_BYTES,
        max_header_size=MAX_HEADER_BYTES,
        max_body_size=most_bytes,
    )
    request = HTTPRequest(
        url,
        headers={"Authorization": client.authorization} if client.authorization is not None else {},
        connect_timeout=deadline_seconds,
        request_timeout=deadline_seconds,
        follow_redirects=False,
        decompress_response=False,
        ssl_options=client.tls,
        user_agent="hangwatch",
    )
    try:
        answer = await connection.fetch(request, raise_error=False)
        error = answer.error if answer.code == 599 else None
    except Exception as raised:  # tornado has a different error for each kind of invalid response
        answer, error = None, raised
    finally:
        connection.close()
    if error is not None:
        raise _explained(error, url, most_bytes)
    assert answer is not None
    if answer.code != HTTPStatus.OK:
        redirected = "returned a redirect, which is not followed" if 300 <= answer.code < 400 else ""
        raise FetchError(f"{_REFUSED.get(answer.code, redirected) or 'returned an error'} (HTTP {answer.code})")
    return bytes(answer.body)


def _explained(error: BaseException, url: str, most_bytes: int) -> Exception:
    """Return the error to raise for an error of tornado: TimeoutError without a response, else FetchError."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return FetchError(f"its certificate is not trusted: {error.verify_message}: --http-config FILE with tls_config")
    if isinstance(error, ssl.SSLError):
        return FetchError(f"TLS failed: {error.reason or error}: is it http:// instead, or another certificate?")
    if isinstance(error, UnsatisfiableReadError):
        return FetchError("sent too many headers: is it a hangwatch daemon?")
    if isinstance(error, HTTPStreamClosedError):
        why = "closed the connection" + (" (does it require a client certificate?)" if url.startswith("https") else "")
        return FetchError(f"{why}, did not send HTTP, or sent more than {most_bytes >> 20} MiB")
    if isinstance(error, socket.gaierror | OSError | HTTPClientError):
        return TimeoutError(str(error))
    return FetchError(f"sent invalid HTTP: {str(error)[:_SHOWN_CHARACTERS]}")
