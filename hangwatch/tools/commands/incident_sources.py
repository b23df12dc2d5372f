"""Incidents that `hangwatch merge` downloads from daemons. URLs or a Prometheus server select the daemons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from hangwatch import words
from hangwatch.cli.usage_errors import InputError
from hangwatch.tools.commands.node_options import Progress, report_failures

if TYPE_CHECKING:
    from hangwatch.tools.fleet.http_client import WebClient
    from hangwatch.tools.fleet.incident_fetch import Site
    from hangwatch.tools.fleet.node_replies import Replies


class FetchRequest(NamedTuple):
    """The incidents to download: URLs, Prometheus server, job, HTTP configurations, and the deadline for each URL."""

    urls: Sequence[str]
    prometheus: str | None
    wanted: str | None
    http_config: Path | None
    prometheus_http_config: Path | None
    deadline_seconds: float


def load_client(path: Path | None, option: str = "--http-config") -> WebClient:
    """Read an HTTP configuration; without a file, use no credentials. Raises InputError, which names `option`."""
    from hangwatch.formats import yaml_file
    from hangwatch.tools.fleet import http_client

    try:
        return http_client.load(path)
    except yaml_file.YamlError as error:
        raise InputError(f"{option}: {error}") from None


def fetch(request: FetchRequest, replies: Replies) -> str | None:
    """Download the incidents of all nodes, show the progress, and print the nodes that did not respond.

    Return the id, key or name of the requested job; None if all jobs were requested. Raises InputError.
    """
    from hangwatch.tools.fleet import incident_fetch as fetching

    client = load_client(request.http_config)
    wanted = request.wanted
    sites = fetching.shorten_names([fetching.parse_url(url) for url in request.urls])
    unreachable: list[str] = []
    if request.prometheus is not None:
        wanted, job_sites, unreachable = _prometheus_sites(request)
        sites += job_sites
    progress = Progress()
    try:
        fetching.fetch(
            sites,
            client,
            wanted=wanted,
            deadline_seconds=request.deadline_seconds,
            on_reply=replies.take,
            on_failure=replies.fail,
            on_progress=lambda now: progress.show(now, len(set(replies.answered)), len(replies.silent)),
        )
    finally:
        progress.end()
    replies.silent += unreachable
    report_failures(replies, request.deadline_seconds)
    return wanted


def _prometheus_sites(request: FetchRequest) -> tuple[str, list[Site], list[str]]:
    """Return the job's key, the daemons on its nodes, and the nodes without a known daemon. Raises InputError."""
    from hangwatch.tools.fleet import incident_fetch as fetching
    from hangwatch.tools.fleet import prometheus

    if request.wanted is None:
        raise click.UsageError("--prometheus needs --job: it finds the nodes of one job")
    client = load_client(request.prometheus_http_config, "--prometheus-http-config")
    where = f"--prometheus {words.printable(request.prometheus or '')}"
    try:
        base = fetching.parse_url(request.prometheus or "").base

        def get(path: str) -> bytes:
            return fetching.page(
                base + path, client, most_bytes=prometheus.MOST_BYTES, deadline_seconds=request.deadline_seconds
            )

        return prometheus.nodes_of(request.wanted, get)
    except fetching.AddressError as error:
        raise InputError(f"--prometheus: {error}") from None
    except (fetching.FetchError, prometheus.PrometheusError) as error:
        raise InputError(f"{where}: {error}") from None
    except TimeoutError as error:
        raise InputError(f"{where}: did not respond: {error}") from None
