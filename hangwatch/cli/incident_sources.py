"""The incidents that `hangwatch merge` takes from daemons: their URLs, or those that a Prometheus knows of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from hangwatch import words
from hangwatch.cli.node_options import Progress, tell
from hangwatch.cli.usage_errors import InputError

if TYPE_CHECKING:
    from hangwatch.fleet.http_client import WebClient
    from hangwatch.fleet.incident_fetch import Site
    from hangwatch.fleet.node_replies import Replies


_Command = TypeVar("_Command", bound=Callable[..., Any])


class Asked(NamedTuple):
    """What is to be fetched, of which job, as whom, and how long each may take."""

    urls: Sequence[str]
    prometheus: str | None
    wanted: str | None
    http_config: Path | None
    prometheus_http_config: Path | None
    deadline_seconds: float


def http_config_option(when: str) -> Callable[[_Command], _Command]:
    """The option by which a command is told who asks."""
    told = f"{when}: certificates and password, in the form of Prometheus' http_config."
    return click.option("--http-config", type=click.Path(path_type=Path), help=told)


def client_of(path: Path | None, option: str = "--http-config") -> WebClient:
    """Who asks. Raises InputError."""
    from hangwatch.fleet import http_client
    from hangwatch.formats import yaml_file

    try:
        return http_client.load(path) if path is not None else http_client.anonymous()
    except yaml_file.YamlError as error:
        raise InputError(f"{option}: {error}") from None


def fetch(asked: Asked, replies: Replies) -> str | None:
    """Fetch from all nodes, show how many have answered, and tell who has not. Returns the job that is meant.

    Raises InputError.
    """
    from hangwatch.fleet import incident_fetch as fetching

    client = client_of(asked.http_config)
    wanted = asked.wanted
    try:
        sites = fetching.named_shortly([fetching.site(url) for url in asked.urls])
    except fetching.AddressError as error:
        raise InputError(str(error)) from None
    gone: list[str] = []
    if asked.prometheus is not None:
        wanted, of_job, gone = _of_prometheus(asked)
        sites += of_job
    progress = Progress()
    try:
        fetching.fetch(
            sites,
            client,
            wanted=wanted,
            deadline_seconds=asked.deadline_seconds,
            on_reply=replies.take,
            on_failure=replies.fail,
            on_progress=lambda now: progress.show(now, len(set(replies.answered))),
        )
    finally:
        progress.end()
    replies.silent += gone
    tell(replies, asked.deadline_seconds)
    return wanted


def _of_prometheus(asked: Asked) -> tuple[str, list[Site], list[str]]:
    """Raises InputError."""
    from hangwatch.fleet import incident_fetch as fetching
    from hangwatch.fleet import prometheus

    if asked.wanted is None:
        raise click.UsageError("--prometheus needs --job: it finds the nodes of one")
    client = client_of(asked.prometheus_http_config, "--prometheus-http-config")
    where = f"--prometheus {words.printable(asked.prometheus or '')}"
    try:
        base = fetching.site(asked.prometheus or "").base

        def get(path: str) -> bytes:
            return fetching.page(
                base + path, client, most_bytes=prometheus.MOST_BYTES, deadline_seconds=asked.deadline_seconds
            )

        return prometheus.nodes_of(asked.wanted, get)
    except fetching.AddressError as error:
        raise InputError(f"--prometheus: {error}") from None
    except (fetching.FetchError, prometheus.PrometheusError) as error:
        raise InputError(f"{where}: {error}") from None
    except TimeoutError as error:
        raise InputError(f"{where}: does not answer: {error}") from None
