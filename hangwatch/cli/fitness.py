"""`hangwatch check`: is this node fit to train?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hangwatch import config
from hangwatch.checks import discovery, listing, runner
from hangwatch.checks.contract import Settings as CheckSettings
from hangwatch.cli.watch import config_option, settings_from
from hangwatch.hang import jobs
from hangwatch.model import CheckResult
from hangwatch.probes import host, procs
from hangwatch.probes.node import Node
from hangwatch.probes.nvml import NvmlSampler

DEADLINE_SECONDS = 9.0  # with the start of Python, the whole command stays within 10 s
FIRST_SWEEP_SECONDS = 3.0
STYLES = {"OK": "green", "UNKNOWN": "magenta", "WARNING": "yellow", "CRITICAL": "bold red"}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the documented JSON form.")
@click.option("--verbose", "-v", is_flag=True, help="Also show the checks' own tables, such as the NVLink matrix.")
@click.option("--fail-on", type=click.Choice(["warning", "critical"]), help="Exit 0 for anything less than this.")
def check(
    names: tuple[str, ...], config_path: Path | None, as_json: bool, verbose: bool, fail_on: listing.FailOn | None
) -> None:
    """Is this node fit to train? Runs all checks (or those named) side by side, within 10 seconds.

    Exits 0, 1, 2, 3 for OK, WARNING, CRITICAL, UNKNOWN, as Nagios and Slurm's HealthCheckProgram expect.
    """
    settings, source = settings_from(config_path)
    check_settings = discovery.settings_for(settings, source)
    discovery.select(names)
    results = _run(names, settings, check_settings)
    if as_json:
        click.echo(listing.to_json(results, host.node_name(), fail_on))
    else:
        _print(results, verbose)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(listing.exit_code(results, fail_on))  # a check that blocks in the kernel must not keep the process


def _run(
    names: tuple[str, ...], settings: config.Settings, check_settings: dict[str, CheckSettings]
) -> list[CheckResult]:
    gpus = NvmlSampler(sample_seconds=1.0, deadline_seconds=5.0)
    gpus.start()
    try:
        sweep = gpus.wait_for_sweep(FIRST_SWEEP_SECONDS)
        pids = frozenset(pid for gpu in sweep.gpus for pid in gpu.pids) if sweep else frozenset[int]()
        node = Node(
            gpus=gpus if sweep else None,
            jobs=jobs.find_jobs(procs.ProcessScan(Path("/proc")).processes(pids), sweep),
            state_directory=Path(settings.store.directory),
            dump_after_seconds=settings.detector.hold_seconds
            + settings.capture.rounds * settings.capture.pause_seconds,
        )
        return runner.run_all(node, check_settings, names, deadline_seconds=DEADLINE_SECONDS - FIRST_SWEEP_SECONDS)
    finally:
        gpus.stop()


def _print(results: list[CheckResult], verbose: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    header, *rows = listing.report_table(results, verbose)
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(table)
    for title, (head, *body) in listing.verbose_tables(results) if verbose else ():
        extra = Table(*head, title=title, title_justify="left", box=None)
        for row in body:
            extra.add_row(*(Text(cell) for cell in row))
        console.print(extra)


COMMANDS = (check,)
