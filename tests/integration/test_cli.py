"""The command line: help, output, and errors that explain what to do. No command prints a traceback."""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import click
import pytest
from msgspec.structs import replace

from hangwatch import cli, store
from hangwatch.cli.job_choice import choose, choose_only
from hangwatch.cli.local_dump import print_jobs
from hangwatch.cli.node_jobs import NO_JOB
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError
from hangwatch.detector import job_watch
from hangwatch.detector.progress_gaps import ProgressRecord
from hangwatch.detector.watch_parts import GapSuspicion, Silence
from hangwatch.model import (
    CheckFirst,
    CheckResult,
    CheckStatus,
    CheckVerdict,
    GpuSample,
    GpuSweep,
    JobState,
    ProcessId,
    SamplerStatus,
    TimelineEntry,
)
from hangwatch.probes.node import host
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.status import build_status
from hangwatch.tables.launchers import TABLE
from hangwatch.tools import commands
from hangwatch.tools.commands.status_tables import status_text
from hangwatch.words import name_ranks
from tests import samples
from tests.commands import (
    HANGWATCH,
    Finished,
    finished,
    hangwatch,
    rank_environ,
    sleeping,
    start,
    write_config,
)
from tests.conftest import load_table
from tests.other_users import as_user, needs_root

NOBODY = 65534
COMMANDS = ["run", "dump", "explain", "merge", "report", "incidents", "status", "config", "check", "demo"]
DUMP = """Process 41: python train.py
Python v3.10.12 (/usr/bin/python3.10)

Thread 41 (active): "MainThread"
    {leaf}
    train (train.py:10)
    <module> (train.py:20)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = start(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 5


def test_every_command_of_every_module_is_found() -> None:
    context = click.Context(cli.hangwatch)
    names = [
        name for each in (cli, commands) for _, name, _ in pkgutil.iter_modules(each.__path__, f"{each.__name__}.")
    ]
    modules = list(map(importlib.import_module, names))
    made = [command for module in modules for command in getattr(module, "COMMANDS", ())]
    assert sorted(command.name for command in made) == cli.hangwatch.list_commands(context)
    assert all(cli.hangwatch.get_command(context, command.name) is command for command in made)


def test_the_help_names_every_command() -> None:
    listed = hangwatch("--help").stdout
    assert [command for command in COMMANDS if f"\n  {command} " not in listed] == []


@pytest.mark.parametrize(("arguments", "words"), load_table("command_lines.toml")["refused"])
def test_bad_input_is_told_and_exits_2(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    done = hangwatch(*arguments)
    assert done.returncode == 2, done
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("command", ["report", "explain", "merge"])
def test_what_a_file_of_others_holds_does_nothing_to_the_terminal(command: str, tmp_path: Path) -> None:
    file = tmp_path / "incident.json"
    file.write_text(json.dumps({"schema_version": 9, "hangwatch_version": "\x1b]0;title\x07\x1b[2J"}))
    done = hangwatch(command, str(file.parent if command == "report" else file))
    assert done.returncode == 2
    assert f"{file}: was written by hangwatch \\x1b]0;title" in done.stderr
    assert all(line.isprintable() for line in done.stderr.splitlines())


def test_config_errors_of_all_sections_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hangwatch.toml"
    path.write_text(
        "[detector]\nhold_secs = 3\n[checks.fd_limit]\nnonsense = 3\n[checks.fd_limt]\nenabled = false\n"
        '[hooks]\non_hung = ["hook.sh"]\non_ended = ["other.sh"]\n[http]\nport = 70000\nhealth_port = 9836\n'
        '[[activities.rules]]\nactivity = "Data Loading"\nfunction = "read"\n'
    )
    for command in (("config", "--check", str(path)), ("run", "--config", str(path)), ("check", "--config", str(path))):
        done = hangwatch(*command)
        assert done.returncode == 2
        for word in (f"{path}:2: [detector]", f"{path}:4: [checks.fd_limit]", f"{path}:5: [checks.fd_limt]"):
            assert word in done.stderr
        assert f"{path}:11: [http]: port" in done.stderr
        assert "did you mean 'hold_seconds'?" in done.stderr and "to 65535" in done.stderr
        assert "are both" not in done.stderr, "a section with wrong keys has no other error"
        if command[0] != "check":  # keys that only the daemon reads
            for word in ("on_hung[0]", "on_ended[0]", "rules[0]: activity 'Data Loading' is not a valid name"):
                assert word in done.stderr


def test_the_sample_configuration_is_good(tmp_path: Path) -> None:
    path = tmp_path / "hangwatch.toml"
    path.write_text(hangwatch("config", "--sample").stdout)
    assert "[checks.clock_skew]" in path.read_text()
    done = hangwatch("config", "--check", str(path))
    assert (done.returncode, done.stdout) == (0, f"{path}: ok\n")


def test_a_second_daemon_on_the_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "hangwatch.toml"
        config.write_text(f'[store]\ndirectory = "{tmp_path}"\n[http]\nlisten = "127.0.0.1"\nport = {port}')
        done = hangwatch("run", "--config", str(config))
    assert done.returncode == 75, "2 would tell systemd never to try again"
    assert f"127.0.0.1:{port}" in done.stderr
    assert "ss -ltnp" in done.stderr


def test_explain_reads_standard_input_files_and_folders(tmp_path: Path) -> None:
    waiting, reading = "all_reduce (torch/distributed/distributed_c10d.py:2000)", "read_shard (loader.py:3)"
    for rank in range(4):
        (tmp_path / f"rank{rank}.txt").write_text(DUMP.format(leaf=reading if rank == 3 else waiting))
    answer = json.loads(hangwatch("explain", "--json", str(tmp_path)).stdout)
    assert [who["rank"] for who in answer["verdict"]["named"]] == [3]
    everything = "".join(
        f"[n1:{rank}]{line}\n"
        for rank in range(4)
        for line in DUMP.format(leaf=reading if rank == 2 else waiting).splitlines()
    )
    page = tmp_path / "out.html"
    done = hangwatch("explain", "-", "--html", str(page), stdin=everything)
    assert "ank 2 (n1" in done.stdout.splitlines()[0], done.stderr
    assert "<html" in page.read_text()
    alone = json.loads(hangwatch("explain", "--json", "--world-size", "6", "-", stdin=everything).stdout)
    assert (alone["world_size"], alone["absent"]) == (6, [[4, 5]])


def test_reports_are_rendered_again_from_the_incident_alone(tmp_path: Path) -> None:
    incident = replace(samples.loader_hang(), node=host.node_name())
    folder = store.open_writable(tmp_path).save(incident, {})
    shown = hangwatch("report", str(folder)).stdout
    assert hangwatch("report", str(tmp_path)).stdout == shown, "the folder of dump -o"
    assert incident.verdict.message.split(",")[0] in " ".join(shown.split())
    page = tmp_path / "page.html"
    assert hangwatch("report", str(folder), "--html", str(page)).returncode == 0
    assert "<html" in page.read_text()
    assert json.loads(hangwatch("report", str(folder), "--json").stdout)["incident_id"] == incident.incident_id
    merged = json.loads(hangwatch("merge", "--json", str(folder)).stdout)
    assert [who["rank"] for who in merged["verdict"]["named"]] == [7]
    config = write_config(tmp_path, tmp_path)
    listed = json.loads(hangwatch("incidents", "--config", str(config), "--json").stdout)
    assert [row["folder"] for row in listed["incidents"]] == [folder.name]
    assert folder.name[:20] in hangwatch("incidents", "--config", str(config), COLUMNS="200").stdout
    for name in ((folder.name,), (), ("--job", incident.job.job_id)):
        assert hangwatch("report", *name, "--config", str(config)).stdout == shown
    assert folder.name in hangwatch("report", "nonsense", "--config", str(config)).stderr
    listed_as = hangwatch("incidents", "--config", str(config)).stdout
    assert "hung; its processes have ended" in listed_as, "no daemon has seen how the job ended"
    write_config(tmp_path, tmp_path / "empty")
    empty = hangwatch("report", "--config", str(config))
    assert (empty.returncode, empty.stdout) == (1, "")
    for told in (empty.stderr, hangwatch("incidents", "--config", str(config)).stdout):
        assert f"in {tmp_path}/empty/incidents, which does not exist" in told
        assert f"set by {config}" in told and "quiet for 2 min 00 s" in told
    (tmp_path / "empty" / "incidents").mkdir(parents=True)
    assert "has no incident that you may read" in hangwatch("report", str(tmp_path / "empty")).stderr
    (folder / "incident.json").write_text("{")
    broken = hangwatch("report", str(folder))
    assert (broken.returncode, str(folder) in broken.stderr) == (2, True)


@needs_root
def test_unreadable_incidents_error_lists_places_and_user() -> None:
    with tempfile.TemporaryDirectory() as name:  # every user may enter this folder
        place = Path(name)
        place.chmod(0o755)
        (place / "incidents").mkdir(mode=0o700)
        config = place / "hangwatch.toml"
        config.write_text(f'[store]\ndirectory = "{place}"\n[socket]\npath = "{place}/socket"\n[http]\nport = 1\n')

        def run_as_nobody(command: str) -> Finished:
            line = [*as_user(NOBODY), *HANGWATCH, command, "--config", str(config)]
            return finished(*line)

        told = run_as_nobody("report").stderr
        assert f"no incidents that you may read in {place}/incidents: Permission denied" in told
        assert f"the socket of the daemon is missing: {place}/socket: No such file" in told
        assert f"uid {NOBODY}" in told
        status = run_as_nobody("status")
        assert status.returncode == 2
        assert (
            "127.0.0.1:1: " in status.stderr
            and f"nor over the user socket: the socket of the daemon is missing: {place}/socket: No such file"
            in status.stderr
        )
        assert f"the addresses are from {config}" in status.stderr


def test_incidents_say_how_long_ago_a_job_ended(tmp_path: Path) -> None:
    incident = samples.loader_hang()
    closed = replace(incident, state=JobState.ENDED, closed_unix_seconds=incident.opened_unix_seconds + 200)
    store.open_writable(tmp_path).save(closed, {})
    config = write_config(tmp_path, tmp_path)
    assert "ended after 3 min 20 s" in hangwatch("incidents", "--config", str(config)).stdout


LEAN = ("hangwatch.daemon", "hangwatch.capture", "apscheduler", "prometheus_client", "tornado", "psutil", "rich")


@pytest.mark.parametrize("command", ["--version", "explain -", "report --help", "run --help", "status", "incidents"])
def test_commands_do_not_load_the_daemon(command: str) -> None:
    program = (
        "import sys; from hangwatch.cli import main\n"
        f"try: main({command.split()!r})\n"
        f"except SystemExit: print('loaded', [name for name in {LEAN} if name in sys.modules])"
    )
    done = finished(sys.executable, "-c", program, input=DUMP.format(leaf="f (a.py:1)"), check=True)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stderr


def test_incidents_lists_the_incidents_of_one_job(tmp_path: Path) -> None:
    of_job = samples.loader_hang()
    other = samples.change_parts(samples.all_waiting(), job_id="77", job_key="k77", job_name="small")
    kept = [store.open_writable(tmp_path).save(one, {}).name for one in (of_job, other)]
    config = write_config(tmp_path, tmp_path)
    for wanted, expected in ((other.job.job_key, kept[1]), ("small", kept[1]), (of_job.job.job_id, kept[0])):
        done = hangwatch("incidents", wanted, "--config", str(config))
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["incident", expected]
    none = hangwatch("incidents", "78", "--config", str(config))
    assert (none.returncode, "78: no incident of such a job" in none.stdout) == (1, True), none.stdout


def test_incidents_of_two_owners_jobs_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    ours = samples.loader_hang()
    theirs = replace(ours, job=replace(ours.job, job_key="0123456789abcdef", owner="uid 1002"), node="gpu-b07")
    done = hangwatch("merge", *[str(store.open_writable(tmp_path / i.node).save(i, {})) for i in (ours, theirs)])
    assert done.returncode == 2
    for words in ("several jobs", "(uid 1002, key 0123456789abcdef)", f"({ours.job.owner}, key {ours.job.job_key})"):
        assert words in done.stderr
    of_before_keys = [replace(i, job=replace(i.job, job_key="", owner="")) for i in (ours, theirs)]
    folders = [store.open_writable(tmp_path / f"before-{i.node}").save(i, {}) for i in of_before_keys]
    assert hangwatch("merge", *map(str, folders)).returncode == 0


@contextlib.contextmanager
def jobs_of(*wanted: tuple[str, int]) -> Iterator[set[int]]:
    """Start a job of one rank for each (name, uid) in `wanted`. Yield the pids of the ranks."""
    with contextlib.ExitStack() as stack:
        yield {
            stack.enter_context(sleeping(*(as_user(user) if user != os.getuid() else ()), **rank_environ(run_id)))
            for run_id, user in wanted
        }


@needs_root
def test_a_name_that_two_jobs_share_is_refused_and_their_keys_are_told(tmp_path: Path) -> None:
    run_id = f"shared-{os.getpid()}"
    with jobs_of((run_id, os.getuid()), (run_id, NOBODY)) as pids:
        refused = hangwatch("dump", "--job", run_id)
        assert refused.returncode == 2, refused.stdout
        assert "2 jobs on this node match" in refused.stderr
        keys = dict(re.findall(r"([0-9a-f]{16}): .*?\b(uid \d+)", refused.stderr))
        assert sorted(keys.values()) == ["uid 0", f"uid {NOBODY}"]
        (mine, theirs) = (json.loads(hangwatch("dump", "--json", "--job", key).stdout)["jobs"] for key in keys)
        assert {job["job"]["job_key"] for job in (*mine, *theirs)} == set(keys)
        dumped = [rank["id"]["pid"] for job in (*mine, *theirs) for rank in job["capture"]["ranks"]]
        assert (len(dumped), set(dumped)) == (2, pids)
        told = hangwatch("dump", "--json", "--job", next(iter(keys))).stdout
        (tmp_path / "dump.json").write_text(told)
        for given in (
            hangwatch("explain", "--json", str(tmp_path / "dump.json")),
            hangwatch("explain", "--json", "-", stdin=told),
        ):
            explained = json.loads(given.stdout)
            assert explained["groups"] == json.loads(told)["jobs"][0]["groups"], given.stderr
        quiet = hangwatch("dump", "--job", next(iter(keys)), "-o", str(tmp_path / "out"))
        header, row = (line.split("\t") for line in quiet.stdout.splitlines())
        assert header == ["job", "owner", "verdict", "named", "message"]
        assert (row[0], row[3]) == (run_id, "none")
        (folder,) = (tmp_path / "out/incidents").iterdir()
        assert quiet.stderr == f"report: {folder}\n"
        left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        dumps = sorted(left - {"incident.json", "event.json", "order", "owner", "report.txt", "report.html"})
        rounds = [re.fullmatch(r"dumps/\d{8}T\d{6}Z-round(\d)/rank0\.txt", dump) for dump in dumps]
        assert [found and found[1] for found in rounds] == ["1", "2"], "its code is known to no rule"


def test_table_of_jobs_begins_with_jobs_that_have_a_named_rank(capsys: pytest.CaptureFixture[str]) -> None:
    nobody, accused = samples.mismatch(), samples.loader_hang()
    looked_at = samples.change_parts(nobody, check_first=(CheckFirst(rank=3, why="w", settle="s"),))
    print_jobs([nobody, looked_at, accused], with_message=False)
    header, *rows = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert header == ["job", "owner", "verdict", "named"]
    assert [row[2] for row in rows] == [accused.verdict.kind, nobody.verdict.kind, nobody.verdict.kind]
    assert [row[3] for row in rows] == [name_ranks(accused.verdict.named), "none", "none; check first: rank 3"]


def test_a_job_is_chosen_by_key_id_or_what_its_user_calls_it() -> None:
    """Choose a job by its key, its id, or the name that a page shows."""
    job = replace(samples.job(range(2), 2), job_name="llama-70b")
    other = replace(job, job_id="7", job_key="fedcba9876543210", job_name=job.job_id)
    for wanted in (job.key, job.job_id, "llama-70b"):
        assert choose(wanted, [other, job]) is job
    with pytest.raises(
        InputError, match=r"jobs here:\n.*\n.*llama-70b of user .* \(Slurm job .*train.py\), torchrun pid "
    ):
        choose("nonsense", [other, job])


def test_job_is_chosen_by_its_program_or_the_beginning_of_its_id() -> None:
    job = replace(samples.job(range(2), 2), job_id="164a3560-1", job_key="0123456789abcdef")
    job = replace(job, launcher_id=ProcessId(pid=4100, start_ticks=700))
    other = replace(job, job_id="d63be51f-2", job_key="fedcba9876543210", program="eval.py", launcher_id=None)
    for wanted in ("train.py", "src/train.py", "164a", "01234", "pid4100-700", "pid4100-700-29500"):
        assert choose(wanted, [other, job]) is job
    for wanted in ("164", "pid4100-701", "pid4100", "rain.py"):
        with pytest.raises(InputError, match="no such job"):
            choose(wanted, [other, job])
    listed = r"2 jobs .* match\n.*\n    fedcba9876543210: .*\n    0123.* torchrun pid 4100, 2 ranks, started .* ago$"
    with pytest.raises(InputError, match=listed):
        choose("train.py", [replace(other, program="train.py"), job])
    assert choose_only([job]) is job
    with pytest.raises(InputError, match=r"there are 2 jobs\n.* with --job:\n    fedcba9876543210: .*\n    0123"):
        choose_only([other, job])


def test_where_no_job_runs_every_launcher_of_the_table_is_told() -> None:
    assert all(launcher.name in NO_JOB for launcher in TABLE.launchers)


def test_status_tells_jobs_of_one_name_apart(capsys: pytest.CaptureFixture[str]) -> None:
    ours = samples.job(range(2), 2)
    theirs = replace(ours, job_key="0123456789abcdef", owner="uid 2")
    other = replace(ours, job_id="another", job_key="fedcba9876543210")
    entries = [JobEntry(job=job, watch=job_watch.begin_watch(job, 5.0, 0.0)) for job in (ours, theirs, other)]
    gpus = (GpuSample(index=0, uuid=ours.gpu_uuids[0]),)
    sweep = GpuSweep(taken_monotonic_seconds=6.0, taken_unix_seconds=1e9, gpus=gpus)
    print(status_text(build_status(Snapshot(sweep=sweep, jobs={entry.job.key: entry for entry in entries}), "n1", 7.0)))
    shown = capsys.readouterr().out
    for words in (f"{ours.job_id} {ours.job_key}", f"{ours.job_id} 0123456789abcdef", "uid 2", ours.owner):
        assert words in shown
    assert "another fedc" not in shown


@pytest.mark.parametrize(("is_read", "is_counted"), [(True, False), (False, True), (False, False)])
def test_status_says_that_no_hang_is_noticed_where_neither_gpu_nor_counter_is_read(
    capsys: pytest.CaptureFixture[str], *, is_read: bool, is_counted: bool
) -> None:
    watch = job_watch.begin_watch(samples.job(range(2), 2), 5.0, 0.0)
    if is_counted:
        watch = replace(watch, progress=ProgressRecord(progressed_at=6.9, total=1440.4))
    entry, sampler = JobEntry(job=samples.job(range(2), 2), watch=watch), SamplerStatus(alive=is_read)
    ended = replace(entry, watch=replace(job_watch.begin_watch(entry.job, 5.0, 0.0), state=JobState.ENDED))
    print(status_text(build_status(Snapshot(sampler=sampler, jobs={"k": entry, "ended": ended}), "n1", 7.0)))
    shown = capsys.readouterr().out
    assert ("detects no hang: use `hangwatch dump" in shown) is not (is_read or is_counted)
    assert ("learning: 1,440 collectives so far" if is_counted else "waiting for the first sign of work") in shown


@pytest.mark.parametrize(
    ("state", "seconds", "measured", "rate"),
    [("training", 2, 2e-10, 0.0), ("training", 2, 0.2, 0.2), ("ended", 2, 0.2, 0.0), ("starting", 90, 0.2, 0.0)],
)
def test_status_tells_no_rate_of_ceased_collectives(state: str, seconds: int, measured: float, rate: float) -> None:
    job = samples.loader_hang().job
    progress = ProgressRecord(progressed_at=7.0 - seconds, per_second=measured, total=9.0)
    watch = replace(job_watch.begin_watch(job, 5.0, 0.0), state=JobState(state), progress=progress)
    (shown,) = build_status(Snapshot(jobs={job.key: JobEntry(job=job, watch=watch)}), "n1", 7.0).jobs
    said = "no new collective for 1 min 30 s: `hangwatch dump` looks now; learning: 9 collectives so far"
    assert (shown.collectives_per_second, shown.message == said) == (rate, seconds == 90)


def test_status_tells_when_a_job_that_hangs_ends_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Count the time to the collective timeout from the moment when power fell, as the report does."""
    fell_quiet = time.time() - 140
    quiet = TimelineEntry(unix_seconds=fell_quiet, state=JobState.QUIET, message="quiet")
    incident = replace(samples.loader_hang(), timeline=(quiet,))
    silent = replace(job_watch.begin_watch(incident.job, 5.0, 0.0), state=JobState.HUNG, silence=Silence(since=-133.0))
    watch = job_watch.with_suspicion(silent, gap=GapSuspicion(advances=9, asked_at=5.0))
    pause = "known pause at this place of at most 258 s: hangwatch pages after 516 s"
    watch = replace(watch, progress=ProgressRecord(progressed_at=-133.0, per_second=0.2), message=f"none; {pause}")
    entry = JobEntry(job=incident.job, watch=watch, incident=incident)
    seen = build_status(Snapshot(jobs={entry.job.key: entry}), "n1", 7.0)
    assert seen.jobs[0].ends_itself_unix_seconds == fell_quiet + 600
    print(status_text(seen))
    (row,) = (
        line for line in capsys.readouterr().out.splitlines() if incident.verdict.message.removesuffix(".") in line
    )
    at = datetime.fromtimestamp(fell_quiet + 600, timezone.utc)
    assert "\t2 min 20 s\t" in row and "\t0/s\t" in row
    assert f"; no progress since {datetime.fromtimestamp(fell_quiet, timezone.utc):%H:%M:}" in row
    assert re.search(rf"; {pause}; times out in 7 min (40|39|3\d) s, at {at:%H:%M:%S} UTC", row)
    late = [TimelineEntry(unix_seconds=fell_quiet - 900, state=JobState.QUIET, message="quiet")]
    overdue = replace(entry, incident=replace(incident, timeline=tuple(late)))
    print(status_text(build_status(Snapshot(jobs={entry.job.key: overdue}), "n1", 7.0)))
    assert "its collective timeout passed at" in capsys.readouterr().out
    over = replace(entry, incident=replace(incident, closed_unix_seconds=fell_quiet + 200))
    assert build_status(Snapshot(jobs={entry.job.key: over}), "n1", 7.0).jobs[0].ends_itself_unix_seconds is None


def test_status_tells_how_long_ago_a_check_looked(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = CheckVerdict(status=CheckStatus.OK, reason="Absent", message="no training job runs on this node")
    result = CheckResult("environment", verdict, success=True, duration_seconds=0.1, ran_unix_seconds=time.time() - 240)
    print(status_text(build_status(Snapshot(checks={"environment": result}), "n1", 7.0)))
    assert "environment\tOK\t4 min ago\tno training job runs on this node" in capsys.readouterr().out


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    folder = store.open_writable(tmp_path).save(samples.loader_hang(), {})
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer):
        done = subprocess.run([*HANGWATCH, "report", folder], stdout=writer, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_version_and_module() -> None:
    assert start("--version").stdout == start("version").stdout
    assert start("--version").stdout.startswith("hangwatch, version ")


def test_help_of_a_command_is_its_help_option() -> None:
    assert hangwatch("help", "dump").stdout == hangwatch("dump", "--help").stdout
    assert hangwatch("help").stdout == hangwatch("help", "help").stdout == hangwatch("--help").stdout


@needs_root
def test_each_of_several_jobs_is_printed_and_a_line_for_each_at_the_end() -> None:
    """Run as a user who sees only their own jobs, because other jobs may exist on this machine."""
    names = [f"several-{os.getpid()}-{number}" for number in range(2)]
    with jobs_of(*((name, NOBODY) for name in names)):
        command = [*as_user(NOBODY), *HANGWATCH, "dump"]
        shown = finished(*command, check=True).stdout
    for name in names:
        assert shown.index("Groups, largest first") < shown.index(f"\n{name}\t")
        assert f"Job       {name}" in shown
    assert "Stacks of the capture" not in shown


@needs_root
def test_the_answer_on_one_job_is_there_while_the_next_is_looked_at() -> None:
    """Kill a rank of the second job between the first answer and its own."""
    names = [f"as-they-come-{os.getpid()}-{number}" for number in range(2)]
    with jobs_of((names[0], NOBODY)) as first, jobs_of((names[1], NOBODY)) as second:
        command = [*as_user(NOBODY), *HANGWATCH, "dump", "--rounds", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dump:
            told = next(line for line in dump.stdout if line.startswith("Job "))
            (pid,) = second if names[0] in told else first
            os.kill(pid, signal.SIGKILL)
            rest = dump.stdout.read()
    assert "1 rank: 0  has ended: " in rest, rest


@needs_root
def test_the_job_of_a_stranger_is_left_out_and_said(tmp_path: Path) -> None:
    """Its launcher shows the job: all users can read which process started which."""
    launcher = tmp_path / "torchrun"
    rank = "import os, time; print(os.getpid(), flush=True); time.sleep(120)"
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-u', '-c', {rank!r}])\n")
    own = f"own-{os.getpid()}"
    command = [sys.executable, str(launcher), "train.py"]
    with (
        jobs_of((own, NOBODY)),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as theirs,
    ):
        try:
            assert theirs.stdout is not None
            pid = int(theirs.stdout.readline())
            dumps = [*as_user(NOBODY), *HANGWATCH, "dump"]
            done = finished(*dumps, check=True)
            refused = finished(*dumps, "--pid", str(pid))
        finally:
            os.killpg(theirs.pid, signal.SIGKILL)
    assert (refused.returncode, refused.stdout) == (1, "")
    # A daemon of another test may run: then the line goes on with what it knows, not with how to install one.
    unread = rf"not dumped: 1 job: .* these processes\n  `sudo hangwatch dump --pid {pid}`(?:, or install|; the daemon) .*\n$"
    assert re.match(unread, refused.stderr)
    assert f"Job       {own}" in done.stdout
    assert not re.search(rf"(?<!\d){theirs.pid}(?!\d)", done.stdout)
    assert re.search(r"^not dumped: \d+ jobs?: .*\buid 0\b", done.stderr, re.MULTILINE), done.stderr


def test_foreign_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Print markup as plain text: a user name or a message may contain markup of the terminal library."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("job", "user"), [("42", "[/bold]x"), ("43", "[red]")], "no jobs")
    shown = capsys.readouterr().out
    assert "[/bold]x" in shown
    assert "[red]" in shown
