"""`hangwatch check`: the health checks of this node or of many nodes."""

import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import click

from hangwatch import config
from hangwatch.capture.job_scan import JobScan
from hangwatch.checks import storage
from hangwatch.checks.framework import node_facts, registry, result_table, runner
from hangwatch.checks.framework.contract import Settings as CheckSettings
from hangwatch.checks.framework.node_facts import Facts
from hangwatch.cli.config_choice import settings_with_checks
from hangwatch.cli.options import config_option
from hangwatch.cli.reach import load_tool, nodes_options, parse_reach
from hangwatch.cli.text_tables import print_checks
from hangwatch.model import CheckResult
from hangwatch.probes.gpu.sampler import run_sampler
from hangwatch.probes.node import host
from hangwatch.probes.node.machine import Node

DEADLINE_SECONDS = 9.0  # 10 s with the start of Python
FIRST_SWEEP_SECONDS = 3.0
LEAST_FACTS_SECONDS = 0.2


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, see docs/json.md.")
@click.option("--verbose", "-v", is_flag=True, help="Also show the tables of checks, such as the NVLink matrix.")
@click.option("--fail-on", type=click.Choice(["warning", "critical"]), help="Exit 0 if the status is lower than this.")
@click.option("--path", metavar="FILE", help="With `check storage`: judge this file and its mount.")
@nodes_options
def check(
    *,
    names: tuple[str, ...],
    config_path: Path | None,
    as_json: bool,
    verbose: bool,
    fail_on: result_table.FailOn | None,
    path: str | None,
    **reaching: Any,
) -> int:
    """Check that this node is fit to train.

    Runs all checks, or the named ones, in parallel, within 10 seconds.

    `hangwatch check storage --path FILE` tells what a file is and if its mount responds.

    --nodes and --jobid run the checks on many nodes at the same time. Nodes with the same result share a line.
    Differences between the nodes (versions, firmware, limits, clocks) are findings, too. See docs/many-nodes.md.

    Exit code: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN, as Nagios and Slurm's HealthCheckProgram expect.
    """
    if path is not None and (names != ("storage",) or any(reaching.values())):
        raise click.UsageError("--path needs the check storage on this node: hangwatch check storage --path FILE")
    if (reach := parse_reach(reaching)) is not None:
        if config_path:
            raise click.UsageError("--config cannot be used with --nodes or --jobid: each node uses its own file")
        registry.select(names)
        return load_tool("check")(reach, names, fail_on, as_json_form=as_json, verbose=verbose)
    began_unix_seconds = time.time()
    settings, _, check_settings = settings_with_checks(config_path)
    registry.select(names)
    if path is not None:
        results, facts = [_judge_file(str(Path(path).absolute()), check_settings["storage"])], Facts()
    else:
        results, facts = _run(names, settings, check_settings, with_facts=as_json)
    if as_json:
        click.echo(
            result_table.to_json(
                results,
                host.node_name(),
                fail_on,
                facts=facts,
                began_unix_seconds=began_unix_seconds,
                printed_unix_seconds=time.time(),
            )
        )
    else:
        _print(results, verbose)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result_table.exit_code(results, fail_on))  # do not wait for a check that is blocked in the kernel


def _judge_file(path: str, settings: CheckSettings) -> CheckResult:
    began_unix_seconds, began = time.time(), time.monotonic()
    return CheckResult(
        check="storage",
        verdict=storage.judge_file(path, Node(), cast("storage.Settings", settings)),
        success=True,
        duration_seconds=time.monotonic() - began,
        ran_unix_seconds=began_unix_seconds,
    )


def _run(
    names: tuple[str, ...],
    settings: config.Settings,
    check_settings: dict[str, CheckSettings],
    *,
    with_facts: bool,
) -> tuple[list[CheckResult], Facts]:
    with run_sampler(5.0) as gpus:
        sweep = gpus.wait_for_sweep(FIRST_SWEEP_SECONDS)
        node = Node(
            gpus=gpus,
            jobs=JobScan(limits=settings.jobs, is_single=True).find(sweep, host.node_name()).jobs,
            state_directory=Path(settings.store.directory),
            dump_after_seconds=settings.dump_after_seconds,
            shell_pid=os.getppid(),
        )
        began, deadline_seconds = time.monotonic(), DEADLINE_SECONDS - FIRST_SWEEP_SECONDS
        wait = node_facts.start_reading(node) if with_facts else None
        results = runner.run_all(node, check_settings, names, deadline_seconds=deadline_seconds)
        remaining_seconds = began + deadline_seconds - time.monotonic()
        return results, wait(max(remaining_seconds, LEAST_FACTS_SECONDS)) if wait else Facts()


def _print(results: list[CheckResult], verbose: bool) -> None:
    _header, *rows = result_table.report_table(results, verbose)
    print_checks(rows)
    for title, table in result_table.verbose_tables(results) if verbose else ():
        click.echo(f"\n{title}")
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            click.echo("  " + "  ".join(f"{cell:{size}}" for cell, size in zip(row, widths, strict=True)).rstrip())


COMMANDS = (check,)
