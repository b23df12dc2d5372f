"""Commands around the daemon: run, status, config, demo."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from hangwatch import config, http
from hangwatch.checks import discovery
from hangwatch.checks.contract import Settings as CheckSettings
from hangwatch.cli.errors import InputError, MachineError
from hangwatch.cli.tables import print_table
from hangwatch.daemon import Daemon
from hangwatch.hang import activity
from hangwatch.model import JobName
from hangwatch.probes import heap, journal
from hangwatch.probes.nvml.sampler import NvmlSampler
from hangwatch.probes.sdnotify import Notifier
from hangwatch.status import JobStatus, Status

DEFAULT_CONFIG = Path("/etc/hangwatch/hangwatch.toml")
STATUS_DEADLINE_SECONDS = 5.0
STATUS_MOST_BYTES = 64 << 20
SIGNAL_SECONDS = 0.2  # a signal is obeyed within this time
STOP_SECONDS = 3.0  # for an orderly end

log = logging.getLogger("hangwatch")

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"TOML file; without it {DEFAULT_CONFIG} where that exists, else the defaults.",
)


def settings_from(path: Path | None) -> tuple[config.Settings, str]:
    """The settings and the name to show for where they come from."""
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    return (config.load(path), str(path)) if path is not None else (config.Settings(), "the defaults")


def _proven(settings: config.Settings, source: str) -> dict[str, CheckSettings]:
    """The settings of every check, once the whole configuration was found to be one that a daemon can run with.

    What `run` refuses, `config --check` refuses. Raises ConfigError, ServeError or PortTakenError.
    """
    activity.load(settings.activities.rules)
    http.prepared(settings.http)
    return discovery.settings_for(settings, source)


@click.command()
@config_option
def run(config_path: Path | None) -> None:
    """Watch this node until told to stop (SIGTERM or Ctrl-C).

    Samples GPU power, finds jobs, takes stacks when a job falls quiet, keeps incidents, and serves metrics on
    port 9836. Changes nothing in the jobs. Runs without a GPU, too: the checks that need none work on.
    """
    heap.share()  # before there is any thread
    settings, source = settings_from(config_path)
    check_settings = _proven(settings, source)
    _log_to_stderr(settings.log.level)
    faulthandler.enable()  # the watchdog's SIGABRT leaves the daemon's own stacks in the journal
    gpus = NvmlSampler(sample_seconds=settings.gpu.sample_seconds, deadline_seconds=settings.gpu.deadline_seconds)
    notifier = Notifier.from_environ(os.environ)
    daemon = Daemon(settings, gpus, notifier=notifier, check_settings=check_settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: daemon.ask_to_stop())
    log.info("started with %s", source)
    try:
        daemon.start()
        heap.give_back()  # what reading the modules used
        # The kernel may deliver a signal to any thread, which does not wake this one; its handler runs when it wakes.
        while not daemon.wait(SIGNAL_SECONDS):
            pass
    except OSError as error:
        daemon.stop()
        raise MachineError(f"the daemon cannot run now: {error}") from error
    except BaseException:
        daemon.stop()
        raise
    log.info("stopping")
    threading.Thread(target=_leave_after, args=(STOP_SECONDS,), daemon=True).start()
    daemon.stop()
    _leave()


def _leave_after(seconds: float) -> NoReturn:
    """Whatever does not come to an end in this time (a slow client, a dead mount) is left behind."""
    time.sleep(seconds)
    _leave()


def _leave() -> NoReturn:
    """End at once: a thread that is blocked in a dead driver or mount must not keep the process."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if journal.is_journal(os.environ, sys.stderr.fileno()):
        handler.setFormatter(journal.JournalFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@click.command()
@config_option
@click.option("--url", help="Where the daemon serves; by default the port of the configuration on this host.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the answer of /status as it is, see docs/json.md.")
def status(config_path: Path | None, url: str | None, as_json: bool) -> None:
    """What the daemon on this node sees: GPUs, jobs and their states, checks."""
    settings, _ = settings_from(config_path)
    base = url or _local_url(settings.http)
    answer = _fetch(f"{base.rstrip('/')}/status")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    try:
        seen = msgspec.convert(answer, Status)
    except msgspec.ValidationError as error:
        raise InputError(f"{base} answers, but not as a hangwatch of this version does: {error}") from None
    print_status(seen)


def _local_url(wanted: config.Http) -> str:
    host = "127.0.0.1" if wanted.listen in ("0.0.0.0", "::", "") else wanted.listen  # noqa: S104 - compared, not bound
    return f"{'https' if wanted.tls_certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{wanted.port}"


def _fetch(url: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url}: must start with http:// or https://")
    try:
        content = _content(url)
    except (OSError, HTTPException, OverflowError) as error:
        raise InputError(
            f"no hangwatch answers at {url}: {getattr(error, 'reason', error)}\n"
            "  is it running? `systemctl status hangwatch`, or start one: `hangwatch run`"
        ) from None
    except ValueError as error:  # no address
        raise InputError(f"--url {url}: {error}") from None
    try:
        return msgspec.json.decode(content)
    except (ValueError, RecursionError):
        raise InputError(f"what answers at {url} is no hangwatch\n  give its address with --url") from None


def _content(url: str) -> bytes:
    """What stands at a URL, up to a bound in bytes and in time, however slowly it comes. Raises OSError."""
    end = time.monotonic() + STATUS_DEADLINE_SECONDS
    content = b""
    with urllib.request.urlopen(url, timeout=STATUS_DEADLINE_SECONDS) as answer:  # noqa: S310 - scheme checked by `_fetch`
        while part := answer.read1(1 << 16):
            content += part
            if len(content) > STATUS_MOST_BYTES:
                raise OSError(f"its answer is longer than {STATUS_MOST_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise OSError(f"its answer takes longer than {STATUS_DEADLINE_SECONDS:g} s")
    return content


def print_status(seen: Status) -> None:
    """The status as tables."""
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
            job.user or "",
            job.state.value + (" (page)" if job.page else ""),
            f"{job.seconds_in_state:.0f} s",
            str(job.ranks) + (f" ({_absent(job)} absent)" if job.absent_local_ranks else ""),
            job.verdict or job.message,
        )
        for job in seen.jobs
    ]
    checks = [(check.check, check.status, check.message) for check in seen.checks]
    print_table(("GPU", "name", "power", "limit", "utilisation", "job", "fault"), gpus, "no GPUs")
    print_table(("job", "owner", "launcher", "user", "state", "for", "ranks", "what"), jobs, "no jobs")
    print_table(("check", "status", "what"), checks, "no checks yet")
    for left_out in seen.left_out:
        click.echo(f"left out {left_out}: see [jobs] in `hangwatch config --sample`")


def _absent(job: JobStatus) -> int:
    return sum(last - first + 1 for first, last in job.absent_local_ranks)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


@click.command("config")
@click.option("--check", "check_path", type=click.Path(path_type=Path), help="Say whether this file can be used.")
@click.option("--sample", is_flag=True, help="Print a configuration with every key, its default and its limits.")
def configuration(check_path: Path | None, sample: bool) -> None:
    """Check a configuration file, or print one to start from."""
    if sample == (check_path is not None):
        raise click.UsageError("give either --check FILE or --sample")
    if sample:
        click.echo(config.sample({name: check.settings for name, check in discovery.checks().items()}))
        return
    assert check_path is not None
    settings = config.load(check_path)
    _proven(settings, str(check_path))
    click.echo(f"{check_path}: ok")


@click.command()
@click.option("--scenario", default="loader", show_default=True, help="What goes wrong; `list` shows them all.")
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2, 64), help="Ranks on the simulated node.")
@click.option("--seed", default=None, type=int, help="Which rank gets stuck; by default another one each time.")
@click.option(
    "--keep", "directory", type=click.Path(path_type=Path, file_okay=False), help="Where the report is to be left."
)
def demo(scenario: str, ranks: int, seed: int | None, directory: Path | None) -> int:
    """See the whole chain work, without a GPU: a job of real processes hangs, and the odd rank is named.

    Exits 0 if the answer was right, 1 if it was wrong.
    """
    from hangwatch.demo import play

    if scenario == "list":
        for name, text in play.descriptions().items():
            click.echo(f"{name:14} {text}")
        return 0
    if scenario not in play.descriptions():
        raise InputError(f"there is no scenario {scenario!r}\n  scenarios: {', '.join(play.descriptions())}")
    seed = int(time.time()) % 100000 if seed is None else seed
    logging.basicConfig(level="ERROR", stream=sys.stderr)
    outcome = play.play(scenario, ranks=ranks, seed=seed, say=click.echo, directory=directory)
    return 0 if outcome.right else 1


COMMANDS = (run, status, configuration, demo)
