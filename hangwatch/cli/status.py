"""`hangwatch status`: what the daemon on this node sees."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click
import msgspec

from hangwatch import config, decoding, words, yaml_file
from hangwatch.cli.errors import InputError
from hangwatch.cli.pages import client_of, http_config_option
from hangwatch.cli.settings import config_option, settings_from
from hangwatch.cli.tables import print_table
from hangwatch.model import JobName
from hangwatch.status import CheckLine, JobStatus, Status
from hangwatch.web_client import WebClient

STATUS_DEADLINE_SECONDS = 5.0
STATUS_MOST_BYTES = 64 << 20


@click.command()
@config_option
@click.option("--url", help="Where the daemon serves; by default the port of the configuration on this host.")
@http_config_option("Where the daemon asks who you are")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the answer of /status as it is, see docs/json.md.")
@click.option("--watch", "is_watched", is_flag=True, help="As `hangwatch top`: every second, until q or Ctrl-C.")
def status(
    config_path: Path | None, url: str | None, http_config: Path | None, as_json: bool, is_watched: bool
) -> int | None:
    """What the daemon on this node sees: GPUs, jobs and their states, checks."""
    settings, source = settings_from(config_path)
    if is_watched:
        if as_json:
            raise click.UsageError("give either --watch or --json")
        from hangwatch.cli import top

        return top.watch(lambda: status_of(answer_of(settings, source, url, http_config)))
    answer = answer_of(settings, source, url, http_config)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        print_status(status_of(answer))
    return None


def answer_of(settings: config.Settings, source: str, url: str | None, http_config: Path | None) -> Any:
    """The answer of /status; over the daemon's socket, with the own jobs, where the port refuses us. Raises InputError.

    `source` is where the settings come from. Who says where to ask, or who he is, is taken at his word.
    """
    base = url or _local_url(settings.http)
    try:
        return _fetch(f"{base.rstrip('/')}/status", client_of(http_config))
    except InputError as error:
        if url is not None or http_config is not None:
            raise
        from hangwatch.cli import own_daemon

        try:
            return decoding.plain(own_daemon.ask(settings.socket.path, "/status"))
        except own_daemon.SocketError as refused:
            why = str(refused)
        except (ValueError, RecursionError):
            why = f"{settings.socket.path}: what answers is no hangwatch"
        raise InputError(
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


def print_status(seen: Status) -> None:
    """The status as tables."""
    unix_now = time.time()
    click.echo(f"{seen.node}  GPU sampler: {seen.sampler}  incidents: {seen.store}")
    shared = Counter(job.job_id for job in seen.jobs)

    def name(job: JobStatus | JobName) -> str:
        """With its key, where two have the name."""
        return f"{job.job_id} {job.job_key}" if shared[job.job_id] > 1 else job.job_id

    gpus = [
        (
            str(gpu.index),
            gpu.name or "",
            _shown(gpu.power_watts, "{:.0f} W"),
            _shown(gpu.power_limit_watts, "{:.0f} W"),
            _shown(gpu.utilization_ratio, "{:.0%}"),
            ", ".join(map(name, gpu.jobs)),
            gpu.fault or "",
        )
        for gpu in seen.gpus
    ]
    jobs = [
        (
            name(job),
            job.owner,
            job.launcher,
            job.user if job.user and job.user != job.owner else "",
            job.state.value + (" (page)" if job.page else ""),
            f"{job.seconds_in_state:.0f} s",
            str(job.ranks) + (f" ({_absent(job)} absent)" if job.absent_local_ranks else ""),
            _what(job, unix_now),
        )
        for job in seen.jobs
    ]
    checks = [(check.check, check.status, looked(check, unix_now), check.message) for check in seen.checks]
    print_table(("GPU", "name", "power", "limit", "utilisation", "job", "fault"), gpus, "no GPUs")
    print_table(("job", "owner", "launcher", "user", "state", "for", "ranks", "what"), jobs, "no jobs")
    if jobs and seen.sampler != "ok":
        click.echo("Without readings of the GPUs no hang is noticed here: `hangwatch dump --rounds 3` looks by hand.")
    print_table(("check", "status", "looked", "what"), checks, "no checks yet")
    for left_out in seen.left_out:
        click.echo(f"left out {left_out}: see [jobs] in `hangwatch config --sample`")


def _what(job: JobStatus, unix_now: float) -> str:
    """The verdict, or what the detector says; and when the job ends itself, where that is known."""
    told, ends = job.verdict or job.message, ends_itself(job, unix_now)
    return f"{told.removesuffix('.')}; {ends}" if ends else told


def ends_itself(job: JobStatus, unix_now: float) -> str:
    """When a job that hangs ends itself: `ends itself in 7 min 40 s, at 03:22:40 UTC`; empty where nobody knows."""
    at = job.ends_itself_unix_seconds
    if at is None:
        return ""
    if at <= unix_now:
        return f"its collective time-out passed at {words.utc(at, '%H:%M:%S UTC')}"
    return f"ends itself in {words.duration(at - unix_now)}, at {words.utc(at, '%H:%M:%S UTC')}"


def looked(check: CheckLine, unix_now: float) -> str:
    """How old the result of a check is: some look once in five minutes, and jobs come meanwhile."""
    return "" if check.ran_unix_seconds is None else words.ago(unix_now - check.ran_unix_seconds)


def _absent(job: JobStatus) -> int:
    return sum(last - first + 1 for first, last in job.absent_local_ranks)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


COMMANDS = (status,)
