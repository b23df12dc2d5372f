"""The commands `run` and `config`."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hangwatch import config
from hangwatch.cli import screen
from hangwatch.cli.config_choice import Proof, settings_with_checks
from hangwatch.cli.options import config_option
from hangwatch.cli.usage_errors import MachineError

if TYPE_CHECKING:
    from hangwatch.checks.framework.contract import Settings as CheckSettings

# Longest time for an orderly stop; up to 5 s of it are for writing incidents
STOP_SECONDS = 8.0

log = logging.getLogger("hangwatch")


def _proven(path: Path | None) -> tuple[config.Settings, str, dict[str, CheckSettings]]:
    """Return the settings, their source and the settings of the checks, after testing that a daemon can run with them.

    `run` and `config --check` both call this function, so they refuse the same files. Raises ConfigError or
    PortTakenError.
    """
    from hangwatch import hooks
    from hangwatch.stacks import activity
    from hangwatch.web import http_server

    proofs: dict[str, Proof] = {
        "activities": lambda settings, _: activity.load(settings.activities.rules),
        "http": lambda settings, _: http_server.prepare(settings.http),
        "hooks": lambda settings, source: hooks.refuse_unusable(settings.hooks, source),
    }
    return settings_with_checks(path, proofs)


def _refuse_port(_context: click.Context, _option: click.Parameter, port: str | None) -> None:
    if port is not None:
        raise click.UsageError("the configuration file sets the port: [http] port; see `hangwatch config --sample`")


@click.command()
@click.option("--port", hidden=True, expose_value=False, callback=_refuse_port)
@config_option
def run(config_path: Path | None) -> None:
    """Run the daemon: monitor this node until SIGTERM or Ctrl-C.

    Samples GPU power, finds training jobs, takes stacks when a job makes no progress, keeps incidents, and serves
    metrics on port 9836. Needs no change in the jobs. Without a GPU, the checks that need none still run.
    """
    from hangwatch.probes.node import daemon_heap

    daemon_heap.share_heap()  # before the first thread starts
    from hangwatch.daemon import Daemon
    from hangwatch.probes.gpu.sampler import NvmlSampler
    from hangwatch.probes.node.sdnotify import Notifier
    from hangwatch.web import http_server

    settings, source, check_settings = _proven(config_path)
    _log_to_stderr(settings.log.level)
    # systemd's watchdog sends SIGABRT: write the daemon's stacks to the journal
    faulthandler.enable()
    gpus = NvmlSampler(sample_seconds=settings.gpu.sample_seconds, deadline_seconds=settings.gpu.deadline_seconds)
    daemon = Daemon(settings, gpus, notifier=Notifier.from_environ(os.environ), check_settings=check_settings)
    # The kernel may deliver a signal to another thread. That does not wake this thread, which runs the handler.
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: daemon.ask_to_stop())
    log.info("started; configuration: %s", source)
    for caution in http_server.cautions(settings.http):
        log.warning("%s", caution.replace("\n ", ";"))
    try:
        daemon.start()
        daemon_heap.trim()  # return the memory that the imports needed
        while not daemon.wait(0.0):
            signals.recv(1)
    except OSError as error:
        daemon.stop()
        raise MachineError(f"the daemon cannot run now: {error}") from error
    except BaseException:
        daemon.stop()
        raise
    log.info("stopping")
    deadline = threading.Timer(STOP_SECONDS, _leave)
    deadline.daemon = True
    deadline.start()
    daemon.stop()
    _leave()


def _leave() -> NoReturn:
    """End the process at once, even if a slow client, a dead driver or a dead mount still blocks a thread."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _log_to_stderr(level: str) -> None:
    from hangwatch.probes.node import journal

    handler = journal.NonBlockingHandler(sys.stderr)
    if journal.is_journal(os.environ, sys.stderr.fileno()):
        handler.setFormatter(journal.JournalFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@click.command("config")
@click.option("--check", "check_path", type=click.Path(path_type=Path), help="Check this file and print its errors.")
@click.option("--sample", is_flag=True, help="Print a file with every key, its description, default and limits.")
def configuration(check_path: Path | None, sample: bool) -> None:
    """Check a configuration file, or print a sample."""
    if sample == (check_path is not None):
        raise click.UsageError("give either --check FILE or --sample")
    from hangwatch.checks.framework import registry

    if sample:
        click.echo(config.sample({name: check.settings for name, check in registry.checks().items()}))
        return
    assert check_path is not None
    settings, _, _ = _proven(check_path)
    from hangwatch.web import http_server

    for caution in http_server.cautions(settings.http):
        screen.complain(f"warning: {caution}")
    click.echo(f"{check_path}: ok")


COMMANDS = (run, configuration)
