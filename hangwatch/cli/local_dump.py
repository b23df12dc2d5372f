"""Dumps of the jobs on this node, and their verdicts, printed by `hangwatch dump`."""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from msgspec.structs import replace

from hangwatch import config, words
from hangwatch.capture import source_lines
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest, GpuSources
from hangwatch.cli import node_jobs, progress_line, screen
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.dump import DumpOptions
from hangwatch.cli.progress_line import Step
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError, with_sudo
from hangwatch.errors import TemporaryError, UserError
from hangwatch.jobs import likely_ranks, membership_search
from hangwatch.model import Frame, Grouping, Incident, Job, JobState, RankDump, Verdict
from hangwatch.probes.base import procfs
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.sampler import NvmlSampler, run_sampler
from hangwatch.probes.node import host
from hangwatch.probes.process import dump_permissions
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.probes.process.pyspy import DumpMode
from hangwatch.probes.torch_recorder import symbols
from hangwatch.report import phrases, text
from hangwatch.stacks import activity
from hangwatch.verdict import second_round
from hangwatch.verdict.wording import stuck_on

MOST_OWNERS = 8
MOST_LIKELY_RANKS = 64


def dump_local(options: DumpOptions) -> int:
    """Dump the jobs of this node. Return the exit code. Raises click.UsageError and InputError."""
    _refuse_conflicts(options)
    settings, _ = settings_from(options.config_path)
    dumped: list[Incident] = []
    symbols.SHARED.keep_in(Path("/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}"))
    with run_sampler(settings.gpu.deadline_seconds) as gpus:
        local = _LocalDump(options, settings, gpus)
        try:
            jobs = local.jobs()
        except InputError as problem:
            jobs = []
            local.refused.append(problem)
        unreadable = _unreadable(jobs, is_selected=bool(options.wanted or options.pids))
        jobs = [job for job in jobs if job not in unreadable]
        for job in jobs:
            dumped.append(incident := local.incident(job))
            _write_or_show(options, incident, is_only_job=len(jobs) == 1)
    if not options.is_special:
        further = local.further_incidents({job.key for job in jobs})
        for incident in further:
            _write_or_show(options, incident, is_only_job=len(jobs) + len(further) == 1)
        dumped += further
    if local.refused and not dumped:
        raise local.refused[-1]
    if options.as_json_form:
        form = _as_json(host.node_name(), dumped, grouped=options.grouped, with_stacks=options.with_stacks)
        click.echo(form, nl=False)
    elif options.directory is not None or len(dumped) > 1:
        print_jobs(dumped, with_message=options.directory is not None)
    _report_unreadable(unreadable, settings.socket.path)
    if not (dumped or unreadable):
        click.echo("\n".join((local.no_daemon or node_jobs.NO_JOB, *local.likely_ranks())), err=True)
    for error in local.refused:
        if isinstance(error, TemporaryError):
            raise error
    return 0 if dumped else 1


def _refuse_conflicts(options: DumpOptions) -> None:
    """Raise click.UsageError for options that cannot be used together on one node."""
    if options.raw is not None:
        raise click.UsageError("--raw needs --nodes or --jobid; on one node -o writes all stacks")
    if options.pids and options.wanted:
        raise click.UsageError("give either --job or --pid")
    if options.with_stacks and options.as_json_form and not options.grouped:
        raise click.UsageError("--json already has all stacks; use --stacks without --json, or with --grouped")


class _LocalDump:
    """One dump of this node. `refused` has the error of each job that the daemon could not dump.

    `no_daemon` is the reason why the daemon was not asked for further jobs.
    """

    def __init__(self, options: DumpOptions, settings: config.Settings, gpus: NvmlSampler) -> None:
        self._options, self._settings, self._gpus = options, settings, gpus
        self._node, self._activities = host.node_name(), activity.load(settings.activities.rules)
        self._sweep = gpus.wait_for_sweep(node_jobs.GPU_SECONDS)
        self.refused: list[UserError | TemporaryError] = []
        self.no_daemon = ""
        self._whole_job: Job | None = None  # the job of the only selected process

    def jobs(self) -> list[Job]:
        """Return the jobs that the options select. Raises InputError."""
        options, limits = self._options, self._settings.jobs
        if options.pids:
            jobs, self._whole_job = node_jobs.jobs_of_pids(options.pids, self._sweep, limits)
            return jobs
        return node_jobs.find_jobs(options.wanted, self._sweep, limits, every=options.grouped)

    def incident(self, job: Job) -> Incident:
        """Dump one job and return its incident. If the kernel denies the user its stacks, the daemon dumps it."""
        by_daemon = None if self._options.is_special else self._daemon_incident(job)
        if by_daemon is not None:
            return by_daemon
        with progress_line.shown() as step:
            step.say(f"job {words.printable(job.job_id)}: taking the stacks of {words.count(len(job.ranks))}")
            incident = diagnose_job(job, self._request(step), self._activities).incident(job, JobState.SUSPECTED)
        verdict = incident.verdict
        if self._whole_job is None or verdict.next_step != stuck_on.dump_whole_job():
            return incident
        return replace(incident, verdict=replace(verdict, next_step=stuck_on.dump_whole_job(self._whole_job.key)))

    def _request(self, step: Step) -> CaptureRequest:
        """Return the request for one job. The progress line shows why a second round follows, if one may."""
        options, settings = self._options, self._settings.capture

        def needs_second_round(ranks: Sequence[RankDump]) -> str:
            if why := second_round.find_reason(ranks, self._activities):
                step.say(f"{why}; looking again in {words.duration(settings.pause_seconds)}")
            return why

        return CaptureRequest(
            node=self._node,
            settings=settings,
            rounds=options.rounds or 1,
            needs_second_round=None if options.rounds else needs_second_round,
            all_processes=options.takes_all_processes,
            mode=DumpMode(native=options.native, include_locals=options.include_locals),
            gpus=GpuSources(read_sweep=lambda: self._sweep, read_traffic=partial(query.traffic, self._gpus)),
        )

    def likely_ranks(self) -> Iterator[str]:
        """Yield a line for each rank that has ended and left helpers, and for each process that may be a rank.

        Such a process holds a GPU or is titled like a worker. Then yield the command that dumps these.
        """
        gpus = node_jobs.gpus_by_pid(self._sweep)
        scanned = ProcessScan().processes(gpus)
        yield from membership_search.list_ended_ranks(scanned)[:MOST_LIKELY_RANKS]
        processes = likely_ranks.find_likely_ranks(scanned, gpus)[:MOST_LIKELY_RANKS]
        if not processes:
            return
        yield "\nThese processes hold a GPU or are titled like a worker:"
        for process in processes:
            held = gpus.get(process.id.pid)
            gpu = f"  gpu {words.fold(held)}" if held else ""
            yield f"  pid {process.id.pid}  {words.printable(likely_ranks.describe(process))}{gpu}"
        yield f"To dump them: hangwatch dump {' '.join(f'--pid {process.id.pid}' for process in processes)}"

    def _daemon_incident(self, job: Job) -> Incident | None:
        """Return the daemon's dump of a job if the kernel denies this user the stacks of its ranks; else None.

        Also None if the daemon cannot dump the job. The reason is then printed.
        """
        ranks = [rank.id.pid for rank in job.ranks]
        if not any(map(_may_not_read, ranks)):
            return None
        from hangwatch.cli import user_socket_client  # slow to import

        if job.uid == os.geteuid():
            try:
                return user_socket_client.dump(self._settings, f"pid={ranks[0]}", self._options.rounds)
            except user_socket_client.SocketError as error:
                if isinstance(error, user_socket_client.BusyError):
                    self.refused.append(error)
                why = f"the daemon can dump your own jobs, but: {error}"
        else:
            why = f"they belong to {job.owner}"
        click.echo(
            f"job {words.printable(job.job_id)}: this user may not read all stacks; {why}\n"
            f"  {_see_all(self._settings.socket.path)}",
            err=True,
        )
        return None

    def further_incidents(self, dumped_keys: Collection[str]) -> list[Incident]:
        """Return the daemon's dumps of this user's other jobs, which only the daemon can find.

        For such a job the kernel denies this user even the environment of the ranks.
        """
        if os.geteuid() == 0:
            return []
        from hangwatch.cli import user_socket_client

        dumped: list[Incident] = []
        try:
            for job in user_socket_client.status(self._settings.socket.path).jobs:
                is_new = job.state is not JobState.ENDED and job.job_key not in dumped_keys
                if is_new and self._options.wanted in (None, job.job_id, job.job_key):
                    key = f"job={job.job_key}"
                    dumped.append(user_socket_client.dump(self._settings, key, self._options.rounds))
        except user_socket_client.BusyError as error:
            self.refused.append(error)
        except user_socket_client.NoDaemonError as error:
            self.no_daemon = f"{error}\nno job found that this user may read; try as root, or --pid"
        except user_socket_client.SocketError:
            pass
        return dumped


def _see_all(socket_path: str) -> str:
    """Return what to type to dump the same jobs with all rights, and what the daemon at this socket can do instead."""
    from hangwatch.cli import user_socket_client

    try:
        user_socket_client.status(socket_path)
    except user_socket_client.NoDaemonError:
        return f"`{with_sudo()}`, or install the daemon (docs/install-systemd.md)"
    except user_socket_client.SocketError:
        pass
    return f"`{with_sudo()}`; the daemon runs: `hangwatch status` shows what it knows of them"


def print_jobs(dumped: Sequence[Incident], *, with_message: bool) -> None:
    """Print a line for each job, with the named ranks first. `with_message` adds the message of the verdict."""
    header = ("job", "owner", "verdict", "named", *(("message",) if with_message else ()))
    rows = []
    for incident in sorted(dumped, key=lambda incident: not incident.verdict.named):
        job, verdict = incident.job, incident.verdict
        named = words.name_ranks(verdict.named) if verdict.named else "none"
        if verdict.check_first and not verdict.named:
            named = f"none; check first: {words.name_ranks(verdict.check_first)}"
        rows.append((job.job_id, job.owner, verdict.kind, named, verdict.message)[: len(header)])
    print_table(header, rows, "")


def _as_json(node: str, dumped: Sequence[Incident], *, grouped: bool, with_stacks: bool) -> str:
    from hangwatch.formats import sighting
    from hangwatch.report import as_json

    if grouped:
        return as_json.render(sighting.make_grouped_dump(node, dumped, time.time(), with_stacks=with_stacks))
    return as_json.render(as_json.dump(node, dumped))


def _unreadable(jobs: Sequence[Job], *, is_selected: bool) -> list[Job]:
    """Return the jobs of other users, without those that this process may dump.

    A job that the user selected is dumped if at least one of its ranks may be dumped.
    """
    others = (job for job in jobs if job.uid != os.geteuid())
    quantify = all if is_selected else any
    return [job for job in others if job.ranks and quantify(_may_not_read(rank.id.pid) for rank in job.ranks)]


def _may_not_read(pid: int) -> bool:
    """True if the kernel denies this user the memory of a process, and so its stacks. See ptrace(2)."""
    return os.geteuid() != 0 and dump_permissions.may_attach(procfs.PROC, pid) is False


def _report_unreadable(unreadable: Sequence[Job], socket_path: str) -> None:
    """Print which jobs were not dumped, and what to type to dump them."""
    if unreadable:
        owners = sorted({job.owner or "these processes" for job in unreadable})
        names = ", ".join(owners[:MOST_OWNERS]) + (" and more" if len(owners) > MOST_OWNERS else "")
        jobs = words.count(len(unreadable), "job")
        click.echo(
            f"not dumped: {jobs}: this user may not read the stacks of {names}\n  {_see_all(socket_path)}", err=True
        )


def _write_or_show(options: DumpOptions, incident: Incident, *, is_only_job: bool) -> None:
    """Write the report of a job to the folder of -o, or print its verdict. An empty line follows, except of one job."""
    if options.directory is not None:
        from hangwatch import store
        from hangwatch.report.html import render_files

        folder = store.open_writable(options.directory).save(incident, render_files(incident))
        click.echo(f"report: {folder}", err=True)
        return
    if options.as_json_form:
        return
    answer = text.render_answer(
        incident,
        color=screen.is_colored(),
        width=screen.width(),
        full=options.full,
        stacks=options.with_stacks,
        source_lines=_read_source_lines(incident.grouping, incident.verdict, incident.job.uid),
    )
    click.echo(answer, nl=not is_only_job, color=screen.is_colored())


def _read_source_lines(grouping: Grouping, verdict: Verdict, uid: int | None) -> dict[Frame, str]:
    """Return the source lines of the groups of suspects, or of an only group. They are printed and not stored."""
    parts, odd = phrases.split_groups(grouping, verdict)
    return source_lines.read([group for group in parts if group.key in odd] or parts[: len(parts) == 1], uid)
