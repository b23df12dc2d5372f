"""Values that a shell completes: checks, scenarios, jobs and incidents. Without an answer, nothing is completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hangwatch.cli.config_choice import settings_from
from hangwatch.errors import TemporaryError, UserError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _completer(find: Callable[[Path | None], Iterable[str]], *, files: bool = False) -> Complete:
    """Return a function for click's `shell_complete`. `find` gets the path of the configuration file."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # only a shell needs it

        config_path: Any = context.params.get("config_path")
        try:
            names = dict.fromkeys(name for name in find(config_path) if name.startswith(incomplete))
        except (OSError, UserError, TemporaryError):
            names = {}
        return [*map(CompletionItem, names), *([CompletionItem(incomplete, type="file")] if files else ())]

    return complete


def _find_checks(_: Path | None) -> Iterable[str]:
    from hangwatch.checks.framework import registry

    return registry.checks()


def _find_scenarios(_: Path | None) -> Iterable[str]:
    from hangwatch.demo.scenarios import SCENARIOS

    return SCENARIOS


def _find_running_jobs(config_path: Path | None) -> Iterator[str]:
    from hangwatch.capture.job_scan import JobScan
    from hangwatch.probes.node import host

    for job in JobScan(limits=settings_from(config_path)[0].jobs).find(None, host.node_name()).jobs:
        yield job.job_id
        yield from filter(None, [job.job_name])


def _find_incidents(config_path: Path | None) -> Iterator[str]:
    from hangwatch import store

    settings = settings_from(config_path)[0]
    return (summary.folder for summary in store.Store(Path(settings.store.directory)).summaries())


def _find_jobs_of_incidents(config_path: Path | None) -> Iterator[str]:
    from hangwatch import store

    settings = settings_from(config_path)[0]
    for summary in store.Store(Path(settings.store.directory)).summaries():
        yield from filter(None, [summary.job_id, summary.job_name])


complete_checks = _completer(_find_checks)
complete_scenarios = _completer(_find_scenarios)
complete_running_jobs = _completer(_find_running_jobs)
complete_incidents = _completer(_find_incidents, files=True)
complete_jobs_of_incidents = _completer(_find_jobs_of_incidents)
