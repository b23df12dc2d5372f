"""`hangwatch dump`: the stacks of this node's jobs, now."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from hangwatch import capture, config, words
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.job_scan import JobScan
from hangwatch.cli import screen
from hangwatch.cli.config_choice import config_option, settings_from
from hangwatch.cli.node_options import Reach, nodes_options, reach_of, topology_option
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError
from hangwatch.errors import TemporaryError, UserError
from hangwatch.model import GpuSweep, Incident, Job, JobState, Verdict, called
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node import host
from hangwatch.probes.process import procfs
from hangwatch.report import text
from hangwatch.stacks import activity
from hangwatch.tables.launchers import TABLE
from hangwatch.verdict import second_round

GPU_SECONDS = 3.0
MOST_OWNERS = 8
NO_JOB = (
    "no training job runs on this node: no process that one of these started\n"
    f"({', '.join(dict.fromkeys(launcher.name for launcher in TABLE.launchers))}),\n"
    "and none that says its rank in an environment that this user may read (as root, or --pid)"
)

SEE_ALL = "`sudo hangwatch dump`, or install the daemon (docs/install-systemd.md)"


class DumpOptions(NamedTuple):
    """What `hangwatch dump` was told, except which nodes."""

    wanted: str | None
    pids: tuple[int, ...]
    rounds: int | None
    native: bool
    include_locals: bool
    as_json_form: bool
    grouped: bool
    with_stacks: bool
    raw: Path | None
    agentless: bool
    topology: Path | None
    directory: Path | None
    config_path: Path | None

    @property
    def is_special(self) -> bool:
        """True where only this process can answer: its daemon neither takes pids, nor native frames or locals."""
        return bool(self.pids or self.native or self.include_locals)


@click.command(context_settings={"allow_extra_args": True})
@click.option("--job", "wanted", help="Only this job, by its id, key or name; by default every job on this node.")
@click.option(
    "--pid",
    "pids",
    type=click.IntRange(1, 1 << 22),
    multiple=True,
    help="These processes instead of jobs; a launcher means its ranks. May be repeated.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 10),
    help="From two on who moves is told, and sequence numbers.  [default: 1, and a second 5 s later where one may "
    "mislead: a rank is in code that no rule knows, or may be behind its GPU, or a flight recorder shows a call open "
    "for 10 s; 2 with --nodes]",
)
@click.option("--native", is_flag=True, help="Native frames, too. Slow: 340 MB and a pause of 0.7 s for each process.")
@click.option("--locals", "include_locals", is_flag=True, help="Local variables, too. They can hold secrets.")
@click.option("--json", "as_json_form", is_flag=True, help="Verdicts, groups and all stacks as JSON, see docs/json.md.")
@click.option("--grouped", is_flag=True, help="With --json: what `hangwatch merge` needs, one stack of each group.")
@click.option("--stacks", "with_stacks", is_flag=True, help="All raw stacks, too; with --json --grouped as well.")
@topology_option
@click.option("--raw", type=click.Path(path_type=Path, file_okay=False), help="With --nodes: all stacks, to DIR.")
@click.option("--agentless", is_flag=True, help="With --nodes: they have py-spy (--remote-command), not hangwatch.")
@click.option(
    "-o",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Leave a report with all stacks in DIR/incidents/NAME, and print a line for each job.",
)
@nodes_options
@screen.no_pager_option
@config_option
def dump(**given: Any) -> int:
    """Stacks of all ranks on this node, now: of every launcher at once, grouped, with the odd one named.

    With --nodes or --jobid on many nodes at the same time, with one verdict for each job over them; a node that does
    not answer by the deadline is evidence and no error. See docs/many-nodes.md.

    Prints the verdict, the groups and the evidence; every raw stack with --stacks, in the folder of -o, or as JSON.
    What is longer than the screen is shown by PAGER, or less; --no-pager prints it.

    Reads, and changes nothing: no process is stopped (but see --native). Exits 1 when there is nothing to dump.
    """
    _refuse_bare(click.get_current_context().args)
    options = DumpOptions(**{name: given.pop(name) for name in DumpOptions._fields})
    reach = reach_of(given, tool="py-spy" if options.agentless else "hangwatch")
    return _dump_here(options) if reach is None else _dump_there(reach, options)


def _dump_there(reach: Reach, options: DumpOptions) -> int:
    """Dump on other nodes. Raises click.UsageError."""
    if options.is_special or options.grouped or options.with_stacks or options.config_path is not None:
        raise click.UsageError("--nodes and --jobid do not go with --pid, --native, --locals, --grouped or --config")
    rounds = options.rounds or 2
    if options.agentless:
        if options.directory is not None or options.topology is not None or reach.via == "kubectl":
            raise click.UsageError(
                "--agentless does not go with -o (--raw keeps the text), --topology or --via kubectl"
            )
        return _dump_agentless(reach, options.wanted, rounds, options.raw, as_json_form=options.as_json_form)
    from hangwatch.cli.many_nodes import Question, dump_nodes  # as below: only who is asked for it is paid for

    return dump_nodes(
        Question(
            reach=reach,
            wanted=options.wanted,
            rounds=rounds,
            as_json_form=options.as_json_form,
            directory=options.directory,
            raw=options.raw,
            topology=options.topology,
        )
    )


def _dump_here(options: DumpOptions) -> int:
    """Dump the jobs of this node. Raises click.UsageError and InputError."""
    _refuse_unfit(options)
    settings, _ = settings_from(options.config_path)
    dumped: list[Incident] = []
    with _sampled(settings) as gpus:
        taken = _Taken(options, settings, gpus)
        try:
            found = taken.jobs()
        except InputError as error:
            found = []
            taken.refused.append(error)
        others = _of_others(found) if options.wanted is None and not options.pids else []
        found = [job for job in found if job not in others]
        for job in found:
            dumped.append(incident := taken.incident(job))
            _leave_or_show(options, incident, alone=len(found) == 1)
    refused = taken.refused
    if not options.is_special:
        known = {job.key for job in found}
        further = _only_by_the_daemon(options.wanted, known, settings, options.rounds, refused)
        for incident in further:
            _leave_or_show(options, incident, alone=len(found) + len(further) == 1)
        dumped += further
    if refused and not dumped:
        raise refused[-1]
    if options.as_json_form:
        form = _as_json(host.node_name(), dumped, grouped=options.grouped, with_stacks=options.with_stacks)
        click.echo(form, nl=False)
    elif options.directory is not None or len(dumped) > 1:
        print_jobs(dumped, with_message=options.directory is not None)
    _tell(others, refused, anything=bool(dumped))
    return 0 if dumped else 1


def _refuse_unfit(options: DumpOptions) -> None:
    """Raise click.UsageError for options that do not go together on one node."""
    if options.raw is not None or options.topology is not None or options.agentless:
        raise click.UsageError(
            "--raw, --topology and --agentless go with --nodes or --jobid; on one node -o leaves all stacks"
        )
    if options.pids and options.wanted:
        raise click.UsageError("give either --job or --pid")
    if options.grouped and not options.as_json_form:
        raise click.UsageError("--grouped is a form of --json")
    if options.with_stacks and options.as_json_form and not options.grouped:
        raise click.UsageError("--json has all stacks; --stacks goes with --json --grouped, or with text")


class _Taken:
    """What one dump of this node takes: its jobs, the incident of each, and why some were `refused`."""

    def __init__(self, options: DumpOptions, settings: config.Settings, gpus: NvmlSampler) -> None:
        self._options, self._settings, self._gpus = options, settings, gpus
        self._node, self._activities = host.node_name(), activity.load(settings.activities.rules)
        self._sweep = gpus.wait_for_sweep(GPU_SECONDS)
        self.refused: list[UserError | TemporaryError] = []

    def jobs(self) -> list[Job]:
        """The jobs that are asked for. Raises InputError."""
        options, limits = self._options, self._settings.jobs
        if options.pids:
            return [_job_of_pids(options.pids, self._sweep, limits)]
        return _jobs(options.wanted, self._sweep, limits, every=options.grouped)

    def incident(self, job: Job) -> Incident:
        """The incident of one job: the daemon's, where the kernel keeps this user from its own job's stacks."""
        options = self._options
        by_daemon = (
            None if options.is_special else _asked_of_the_daemon(job, self._settings, options.rounds, self.refused)
        )
        if by_daemon is not None:
            return by_daemon
        may_add_round = options.rounds is None
        request = capture.CaptureRequest(
            node=self._node,
            settings=self._settings.capture,
            rounds=options.rounds or 1,
            needs_second_round=partial(second_round.is_needed, table=self._activities) if may_add_round else None,
            mode=capture.DumpMode(native=options.native, include_locals=options.include_locals),
            ask_nccl=not options.grouped,  # who asks many nodes waits for the slowest, and not for long
            gpus=capture.GpuSources(read_sweep=lambda: self._sweep, read_traffic=partial(query.traffic, self._gpus)),
        )
        return diagnose_job(job, request, self._activities).incident(job, JobState.SUSPECTED)


def print_jobs(dumped: Sequence[Incident], *, with_message: bool) -> None:
    """A line for each job, those first of whom somebody is named; with the message where no answer was printed."""
    header = ("job", "owner", "verdict", "named", *(("message",) if with_message else ()))
    rows = []
    for incident in sorted(dumped, key=lambda incident: not incident.verdict.named):
        job, verdict = incident.job, incident.verdict
        rows.append((job.job_id, job.owner, verdict.kind, _named(verdict), verdict.message)[: len(header)])
    print_table(header, rows, "")


def _named(verdict: Verdict) -> str:
    if verdict.named:
        return words.who(verdict.named)
    return f"nobody, first {words.who(verdict.first_look)}" if verdict.first_look else "nobody"


def _as_json(node: str, dumped: Sequence[Incident], *, grouped: bool, with_stacks: bool) -> str:
    from hangwatch.fleet import sighting
    from hangwatch.report import as_json

    if grouped:
        return as_json.render(sighting.grouped(node, dumped, time.time(), with_stacks=with_stacks))
    return as_json.render(as_json.dump(node, dumped))


def _of_others(found: Sequence[Job]) -> list[Job]:
    """The jobs of other users whose stacks the kernel keeps from us: their answers would tell nothing."""
    if os.geteuid() == 0:
        return []
    from hangwatch.cli import user_socket_client

    closed = (job for job in found if user_socket_client.may_not_read([rank.id.pid for rank in job.ranks]))
    return [job for job in closed if job.uid != os.geteuid()]


def _tell(others: Sequence[Job], refused: Sequence[Exception], *, anything: bool) -> None:
    """Whose jobs were left out, or that there is none. Raises TemporaryError where a job was refused for now."""
    if others:
        owners = sorted({job.owner for job in others})
        whose = ", ".join(owners[:MOST_OWNERS]) + (" and more" if len(owners) > MOST_OWNERS else "")
        jobs = words.count(len(others), "job")
        click.echo(f"left out: {jobs} of others, whose stacks this user may not read: {whose}\n  {SEE_ALL}", err=True)
    elif not anything:
        click.echo(NO_JOB, err=True)
    for error in refused:
        if isinstance(error, TemporaryError):
            raise error


def _asked_of_the_daemon(
    job: Job, settings: config.Settings, rounds: int | None, refused: list[UserError | TemporaryError]
) -> Incident | None:
    """The own job as the daemon of this node sees it, where the kernel keeps us from its stacks; else None.

    What the daemon refuses for now goes to `refused`.
    """
    if os.geteuid() == 0:
        return None
    from hangwatch.cli import user_socket_client

    ranks = [rank.id.pid for rank in job.ranks]
    if not user_socket_client.may_not_read(ranks):
        return None
    if job.uid == os.geteuid():
        try:
            return user_socket_client.dump(settings, f"pid={ranks[0]}", rounds)
        except user_socket_client.SocketError as error:
            if isinstance(error, user_socket_client.BusyError):
                refused.append(error)
            why = f"its socket does it for your own jobs, but {error}"
    else:
        why = f"they are not yours: {job.owner}"
    click.echo(f"job {words.printable(job.job_id)}: this user may not read all stacks; {why}\n  {SEE_ALL}", err=True)
    return None


def _only_by_the_daemon(
    wanted: str | None,
    known: Collection[str],
    settings: config.Settings,
    rounds: int | None,
    refused: list[UserError | TemporaryError],
) -> list[Incident]:
    """The own jobs that only the daemon finds: this user may not even read the environment of their ranks.

    What it refuses for now goes to `refused`.
    """
    if os.geteuid() == 0:
        return []
    from hangwatch.cli import user_socket_client

    dumped: list[Incident] = []
    try:
        named = [job for job in user_socket_client.jobs(settings) if wanted in (None, job.job_id, job.job_key)]
        for job in named:
            if job.job_key not in known:
                dumped.append(user_socket_client.dump(settings, f"job={job.job_key}", rounds))
    except user_socket_client.BusyError as error:
        refused.append(error)
    except user_socket_client.SocketError:
        pass
    return dumped


def _leave_or_show(options: DumpOptions, incident: Incident, *, alone: bool) -> None:
    """Leave a report, else print the answer on a job as soon as it is there: a pager would hold up the next one."""
    if options.directory is not None:
        click.echo(f"report: {_leave(options.directory, incident)}", err=True)
        return
    if options.as_json_form:
        return
    stacks = options.with_stacks
    answer = text.render_answer(incident, color=screen.is_colored(), width=screen.width(), stacks=stacks)
    if alone:
        screen.show(answer)
    else:
        click.echo(answer, color=screen.is_colored())


def _dump_agentless(reach: Reach, wanted: str | None, rounds: int, raw: Path | None, *, as_json_form: bool) -> int:
    from hangwatch.cli.dump_agentless import AgentlessQuestion, dump_agentless

    return dump_agentless(AgentlessQuestion(reach, wanted, rounds, as_json_form, raw), settings_from(None)[0])


def _refuse_bare(given: Sequence[str]) -> None:
    """Raise click.UsageError for pids or a job without the option that they go with."""
    if given:
        are_pids = all(map(str.isdecimal, given))
        meant = " ".join(f"--pid {pid}" for pid in given) if are_pids else f"--job {shlex.quote(given[0])}"
        raise click.UsageError(f"pids and jobs go with an option: hangwatch dump {meant}")


def _job_of_pids(pids: tuple[int, ...], sweep: GpuSweep | None, limits: config.Jobs) -> Job:
    """These processes; a launcher means its ranks, which it only waits for."""
    missing = [pid for pid in pids if not procfs.read_state(pid)]
    if missing:
        raise InputError(f"--pid {missing[0]}: no such process")
    scan = JobScan(limits=limits)
    found = scan.find(sweep, host.node_name()).jobs
    launched = {launcher.pid: job for job in found if job.ranks for launcher in job.launcher_ids}
    jobs = [launched[pid] for pid in pids if pid in launched]
    if len(jobs) == len(pids) and len({job.key for job in jobs}) == 1:
        return jobs[0]
    meant = [[rank.id.pid for rank in launched[pid].ranks] if pid in launched else [pid] for pid in pids]
    return capture.job_of_pids(list(dict.fromkeys(pid for ranks in meant for pid in ranks)), scan.processes)


@contextmanager
def _sampled(settings: config.Settings) -> Iterator[NvmlSampler]:
    gpus = NvmlSampler(sample_seconds=1.0, deadline_seconds=settings.gpu.deadline_seconds)
    gpus.start()
    try:
        yield gpus
    finally:
        gpus.stop()


def _jobs(wanted: str | None, sweep: GpuSweep | None, limits: config.Jobs, *, every: bool) -> list[Job]:
    """The jobs on this node, or the wanted one; with `every` all of that name, and none is an answer, too.

    Who asks many nodes knows only from all of them which job is meant.
    """
    found = JobScan(limits=limits).find(sweep, host.node_name())
    for left_out in found.left_out:
        click.echo(f"left out {left_out}: see [jobs] in `hangwatch config --sample`", err=True)
    if every or wanted is None:
        return [job for job in found.jobs if wanted is None or job.is_called(wanted)]
    return [choose(wanted, found.jobs)]


def choose(wanted: str, found: Sequence[Job]) -> Job:
    """The job of this key, else of this id, else that its user calls so, as of a page.

    Raises InputError where there is none, or the name is that of several.
    """
    chosen = called(wanted, found)
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        here = "; ".join(words.printable(words.which_job(job)) for job in found) or "none"
        raise InputError(f"--job {wanted}: no such job on this node\n  jobs here: {here}")
    raise InputError(
        f"--job {wanted}: {len(chosen)} jobs on this node have this name\n"
        f"  give the key of one: {', '.join(f'{job.key} ({job.owner})' for job in chosen)}"
    )


def _leave(directory: Path, incident: Incident) -> Path:
    from hangwatch import store
    from hangwatch.report.folder import folder_files

    return store.open_writable(directory).save(incident, folder_files(incident))


COMMANDS = (dump,)
