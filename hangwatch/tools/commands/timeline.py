"""`hangwatch timeline`: the last collectives of the ranks of a job, as a trace for Perfetto and Chrome."""

import sys
from pathlib import Path

import click

from hangwatch import words
from hangwatch.cli import node_jobs, progress_line
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.job_choice import choose_only
from hangwatch.cli.options import config_option, job_option, pid_option
from hangwatch.model import Fault, Job, RankId
from hangwatch.probes.gpu.sampler import run_sampler
from hangwatch.report.phrases import explain_faults
from hangwatch.tools import trace_events
from hangwatch.tools.commands.output_files import write_new
from hangwatch.tools.trace_events import RankTrace

MOST_RECORDS = 1 << 17  # of all ranks: all records of 32 full recorders


@click.command(short_help="Write the last collectives of all ranks of a job as a Perfetto trace.")
@job_option("The job, by id, key or name.  [default: the only job on this node]")
@pid_option("Show these processes instead. The pid of a launcher means all its ranks. Repeatable.")
@click.option(
    "-o",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this new file.  [default: standard output, if it is no terminal]",
)
@config_option
def timeline(wanted: str | None, pids: tuple[int, ...], path: Path | None, config_path: Path | None) -> int:
    """Write the last collectives of all ranks of a job on this node as a trace (JSON).

    Open it in ui.perfetto.dev or chrome://tracing. It has a track for each rank and group, and the power of the GPUs. A
    bar begins when the rank enqueued the operation. It ends at the next one of the group, or when NCCL's watchdog
    saw the completion. An open operation ends when it was read.

    No process is stopped. Exits 1 if there is nothing to show.
    """
    if pids and wanted:
        raise click.UsageError("give either --job or --pid")
    if path is None and sys.stdout.isatty():
        raise click.UsageError("a trace is not for a terminal: give -o FILE")
    settings, _ = settings_from(config_path)
    with run_sampler(settings.gpu.deadline_seconds) as gpus, progress_line.shown() as step:
        sweep = gpus.wait_for_sweep(node_jobs.GPU_SECONDS)
        if pids:
            jobs, _ = node_jobs.jobs_of_pids(pids, sweep, settings.jobs)
        else:
            jobs = node_jobs.find_jobs(wanted, sweep, settings.jobs, every=False)
        if not jobs:
            click.echo(node_jobs.NO_JOB, err=True)
            return 1
        job = choose_only(jobs)
        step.say(f"job {words.printable(job.job_id)}: reading the flight recorders of {words.count(len(job.ranks))}")
        traces, faults = _read(job)
        sweeps = [each for each in dict.fromkeys((sweep, gpus.latest())) if each is not None]
    operations = sum(len(recorder.records) for trace in traces for recorder in trace.recorders)
    for line in explain_faults("collectives", faults):
        click.echo(words.printable(line), err=True)
    if not operations:
        click.echo(f"job {words.printable(job.job_id)}: no trace: no flight recorder holds a collective", err=True)
        return 1
    trace = trace_events.render(traces, sweeps)
    if path is None:
        sys.stdout.buffer.write(trace)
    else:
        write_new(path, trace)
        ranks = sum(any(recorder.records for recorder in trace.recorders) for trace in traces)
        click.echo(f"wrote {path}: {words.count(operations, 'operation')} of {words.count(ranks)}", err=True)
    return 0


def _read(job: Job) -> tuple[list[RankTrace], list[tuple[RankId, Fault]]]:
    """Return the flight recorders of the ranks of a job, and the reasons why some could not be read."""
    most = max(1, MOST_RECORDS // max(1, len(job.ranks)))
    traces, faults = [], []
    for rank, recorders, rank_faults in node_jobs.read_recorders(job):
        traces.append(RankTrace(rank, [trace_events.keep_newest(each, most) for each in recorders]))
        faults += rank_faults
    return traces, faults


COMMANDS = (timeline,)
