"""A launcher that waits without ranks: how it is found, captured late, and judged by its sockets."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config, detector
from hangwatch.capture.request import CaptureRequest, NodePaths
from hangwatch.capture.rounds import capture
from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.job_watch import MotionCount
from hangwatch.jobs import discovery
from hangwatch.model import (
    Frame,
    Group,
    Grouping,
    Incident,
    Job,
    JobState,
    Member,
    Motion,
    NotMonitored,
    ProcessId,
    Rank,
    RankId,
    Waiting,
)
from hangwatch.probes.base import procfs
from hangwatch.probes.network import sockets
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.state.on_scan import ENDED_SHOWN_SECONDS, RANKS_CAME, WAITS_NO_MORE
from hangwatch.verdict import judge
from hangwatch.verdict.wording import job_headlines
from tests.conftest import identity
from tests.proc_tree import jobs_in, lay_out
from tests.unit import test_progress

RULES = Detector(confirming_captures=1, hold_seconds=20, startup_no_ranks_hold_seconds=200)
LAUNCHER = ProcessId(pid=50, start_ticks=100_000)  # 1,000 s after boot
WAITING = Waiting(launcher="torchrun", run_id="llama-7b", nodes="2", endpoint="10.0.0.1:29400")
STORE_WAIT = (Frame(function="next_rendezvous", file="torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py"),)


# --- launchers that are a job ----------------------------------------------------------------------------------------


def test_what_a_launcher_started_that_has_no_rank_is_no_job(tmp_path: Path) -> None:
    assert jobs_in("launchers_at_work", tmp_path) == ()


def test_a_launcher_that_waits_is_not_the_program_of_its_ranks(tmp_path: Path) -> None:
    launcher = "1 (init) S parent=0 start=1\n50 (torchrun) S parent=1 start=50\n  $ python torchrun train.py\n"
    rank = "51 (python) S parent=50 start=60\n  $ python -u train.py\n  + RANK=0 WORLD_SIZE=1 LOCAL_RANK=0\n"
    for text, program in ((launcher, ""), (launcher + rank, "train.py")):
        (job,) = discovery.find_jobs(ProcessScan(lay_out(text, tmp_path / f"of{program}")).processes()).jobs
        assert job.program == program


def test_a_child_that_has_not_executed_its_program_yet_changes_nothing(tmp_path: Path) -> None:
    line = "  $ python torchrun --nnodes 2 train.py\n"
    text = f"1 (init) S parent=0 start=1\n50 (pt_elastic) S parent=1 start=50\n{line}"
    text += f"51 (pt_elastic) S parent=50 start=60\n{line}"
    (job,) = discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs
    assert [process.pid for process in job.processes] == [50]


def test_process_read_during_execve_is_read_as_the_new_program(tmp_path: Path) -> None:
    """An earlier version joined the old name with the new command line."""
    above = "1 (init) S parent=0 start=1\n50 (pt_elastic) S parent=1 start=50\n  $ python torchrun --nnodes 2 t.py\n"
    before = above + "51 (pt_elastic) S parent=50 start=60\n  $ python torchrun --nnodes 2 t.py\n @ uid=0 /u\n"
    after = above + "51 (python) S parent=50 start=60\n  $ python t.py\n @ uid=7 /u\n"
    after += " + RANK=0 WORLD_SIZE=2 LOCAL_RANK=0\n"
    root, later = lay_out(before, tmp_path / "before"), lay_out(after, tmp_path / "after")
    cmdline = root / "51" / "cmdline"
    cmdline.unlink()
    os.mkfifo(cmdline)

    def execute() -> None:
        with cmdline.open("wb") as asked:  # blocks until the scan reads it
            shutil.rmtree(root / "51")
            shutil.copytree(later / "51", root / "51")
            asked.write((later / "51" / "cmdline").read_bytes())

    executing = threading.Thread(target=execute)
    executing.start()
    (job,) = discovery.find_jobs(ProcessScan(root).processes()).jobs
    executing.join()
    assert (job.waiting, [rank.id.pid for rank in job.ranks], job.uid) == (None, [51], 7)


def test_process_without_command_line_is_no_waiting_launcher(tmp_path: Path) -> None:
    text = "1 (init) S parent=0 start=1\n50 (pt_elastic) S parent=1 start=50\n  $ python torchrun --nnodes 2 t.py\n"
    text += "51 (pt_elastic) S parent=50 start=60\n"
    assert discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs == ()


def test_what_a_user_wrote_is_cut_short_and_printable(tmp_path: Path) -> None:
    command = "'torchrun' '--rdzv-id' '\x1b[2J" + "x" * 900 + "' --nnodes 2 --rdzv-endpoint a:99999999 t.py"
    text = f"1 (init) S parent=0 start=1\n50 (pt_elastic) S parent=1 start=50\n  $ {command}\n"
    (job,) = discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs
    assert job.waiting is not None and job.waiting.port is None
    assert len(job.waiting.run_id) == 64 and job.waiting.run_id.isprintable()
    assert len(job.job_id) <= 72


def test_password_in_the_endpoint_of_a_launcher_is_not_kept(tmp_path: Path) -> None:
    command = "'torchrun' '--rdzv-id' 'r' '--nnodes' '2' '--rdzv-endpoint' 'etcd://ada:hunter2@10.0.0.1:2379' t.py"
    text = f"1 (init) S parent=0 start=1\n50 (pt_elastic) S parent=1 start=50\n  $ {command}\n"
    (job,) = discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs
    assert (job.waiting.endpoint, job.waiting.port) == ("etcd://***@10.0.0.1:2379", 2379)


def test_launchers_of_one_owner_are_limited_and_displace_no_ranks(tmp_path: Path) -> None:
    text = "1 (init) S parent=0 start=1\n"
    for pid in range(1000, 2000):
        text += f"{pid} (pt_elastic) S parent=1 start=5\n $ torchrun --nnodes 2 --rdzv-id r{pid} t.py\n @ uid=7 /u\n"
    slot = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0"
    text += f"3000 (python) S parent=1 start=9\n $ python t.py\n + {slot}\n @ uid=7 /u\n"
    found = discovery.find_jobs(
        ProcessScan(lay_out(text, tmp_path)).processes(max_per_owner=5000, budget_seconds=60),
        limits=config.Jobs(max_jobs_per_owner=4),
    )
    assert len(found.jobs) == 4
    assert [job.processes[0].pid for job in found.jobs if job.ranks] == [3000]
    assert found.left_out == (NotMonitored(owner="uid 7", jobs=997, ranks=0),)


# --- its life next to that of its ranks ------------------------------------------------------------------------------


def launcher(waiting: Waiting = WAITING) -> Job:
    return Job(
        job_id="llama-7b",
        job_key="of-the-launcher",
        launcher="torchrun",
        launcher_id=LAUNCHER,
        ranks=(),
        waiting=waiting,
    )


def ranks(pid: int = 100, key: str = "of-the-ranks") -> Job:
    two = (Rank(id=ProcessId(pid=pid + i, start_ticks=120_000 + pid), rank=i, local_rank=i) for i in range(2))
    return replace(launcher(), job_key=key, ranks=tuple(two), waiting=None)


class Life(test_progress.Life):
    """A replacement of the daemon on a node without power readings."""

    def __init__(self, now: float = 1001.0) -> None:
        super().__init__(now, RULES)

    def look_at(self, motion: Motion = Motion.FROZEN, frames: tuple[Frame, ...] = STORE_WAIT) -> None:
        found = Grouping(groups=(group(motion=motion, frames=frames),))
        self.look(found, "of-the-launcher", verdict=judge.judge(found))

    @property
    def states(self) -> dict[str, JobState]:
        return {key: entry.watch.state for key, entry in self.snapshot.jobs.items()}

    @property
    def pages(self) -> bool:
        return any(entry.page for entry in self.snapshot.jobs.values())


def member(
    waiting: Waiting | None = WAITING, node: str = "n1", pid: int = 50, motion: Motion = Motion.FROZEN
) -> Member:
    return Member(id=RankId(node=node, pid=pid), waiting=waiting, motion=motion, rounds=3)


def group(*members: Member, motion: Motion = Motion.FROZEN, frames: tuple[Frame, ...] = STORE_WAIT) -> Group:
    return Group(
        key="k", activity="rendezvous", members=members or (member(motion=motion),), waits_for="ranks", frames=frames
    )


def waits(seconds: int = 99, job: Job | None = None) -> Life:
    """Return the state after a launcher has waited this long. The default is until it is captured."""
    life = Life()
    life.discover(job or launcher())
    life.sample(seconds)
    return life


def test_launcher_is_captured_after_half_of_its_hold() -> None:
    life = waits(98)
    assert life.states == {"of-the-launcher": JobState.STARTING}
    assert not life.looks
    life.sample(1)
    assert life.looks == ["no rank, 100 s after its launcher began to wait"]


@pytest.mark.parametrize("motion", [Motion.FROZEN, Motion.MOVING])
def test_launcher_is_stalled_and_pages_after_its_hold(motion: Motion) -> None:
    life = waits()
    life.look_at(motion)
    assert life.states == {"of-the-launcher": JobState.STALLED}
    life.sample(90)
    life.look_at(motion)
    assert life.states == {"of-the-launcher": JobState.STALLED}
    assert len(life.looks) > 1
    life.sample(9)
    assert life.now == 1199 and not life.pages
    life.sample(1)
    assert life.pages


def test_srun_and_mpirun_have_no_stack_and_never_page() -> None:
    life = waits(job=launcher(Waiting(launcher="srun")))
    life.look_at(Motion.UNKNOWN, ())
    life.sample(1000)
    assert life.states == {"of-the-launcher": JobState.STALLED}
    assert not life.pages


@pytest.mark.parametrize("key", ["of-the-launcher", "of-the-ranks"])
def test_once_its_ranks_come_the_incident_closes_and_there_is_one_job_that_starts(key: str) -> None:
    life = waits()
    life.look_at()
    life.discover(ranks(key=key))
    assert life.states == {key: JobState.STARTING}
    assert life.snapshot.jobs[key].watch.identity.began == life.now, "its start begins with its ranks"
    last = life.saved[-1]
    assert last.closed_unix_seconds == life.unix and last.timeline[-1].message == RANKS_CAME


def test_rank_mistaken_for_launcher_trains_with_first_work() -> None:
    # The scan sees the rank between fork(2) and execve(2), which keeps the pid. Later its power must count.
    life = Life()
    rank = ranks().ranks[0]
    life.discover(replace(launcher(), launcher_id=rank.id, job_key="of-the-ranks"))
    life.discover(ranks())
    (entry,) = life.snapshot.jobs.values()
    assert entry.watch.identity.has_ranks and entry.watch.message == "waiting for the first sign of work"


@pytest.mark.parametrize("first", [50, 60], ids=["the one that waited longer", "the one that came"])
def test_two_launchers_of_one_job_on_one_node_are_both_over_when_their_ranks_come(first: int, tmp_path: Path) -> None:
    # Two containers start a launcher each for one job. The ranks of either launcher may have the best claim to the
    # job.
    command = "'torchrun' '--nnodes' '2' '--rdzv-id' 'r' '--rdzv-endpoint' '127.0.0.1:29400' t.py"
    waiting = "1 (init) S parent=0 start=1\n"
    for pid in (50, 60):
        waiting += f"{pid} (pt_elastic) S parent=1 start={pid}\n  $ {command}\n @ uid=7 /u\n"
    come = waiting
    for number, pid in enumerate(sorted((50, 60), key=lambda pid: pid != first)):
        slot = f"RANK={number} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=r"
        slot += " MASTER_ADDR=127.0.0.1 MASTER_PORT=40000"
        come += f"{pid + 1} (python) S parent={pid} start={70 + number}\n  $ python t.py\n + {slot}\n @ uid=7 /u\n"
    before = discovery.find_jobs(ProcessScan(lay_out(waiting, tmp_path / "before")).processes()).jobs
    assert [job.job_id for job in before] == ["r", "r-p60"]
    (job,) = discovery.find_jobs(ProcessScan(lay_out(come, tmp_path / "come")).processes()).jobs
    assert sorted(launcher.pid for launcher in job.launcher_ids) == [50, 60]
    life = Life()
    life.discover(*before)
    life.discover(job)
    assert [(entry.job.job_id, entry.watch.state) for entry in life.snapshot.jobs.values()] == [
        ("r", JobState.STARTING)
    ]


def test_launcher_with_ended_ranks_ends_job_and_waits_afterwards() -> None:
    life = Life(1300.0)
    life.discover(ranks())
    life.discover(launcher())
    assert life.states == {"of-the-ranks": JobState.ENDED}
    life.sample(int(ENDED_SHOWN_SECONDS))
    life.discover(launcher())
    assert life.states == {"of-the-ranks": JobState.ENDED}
    life.sample(1)
    life.discover(launcher())
    life.discover(launcher())
    assert life.states == {"of-the-launcher": JobState.STARTING}
    assert life.snapshot.jobs["of-the-launcher"].watch.identity.began == 1300, "it waits since its ranks ended"


def test_launcher_with_long_ended_ranks_ends_their_job() -> None:
    life = Life(1300.0)
    life.discover(ranks())
    life.sample(int(ENDED_SHOWN_SECONDS) + 100)
    life.discover(ranks())
    assert life.states == {"of-the-ranks": JobState.UNKNOWN}, "no reading of a GPU in all that time"
    life.discover(launcher())
    assert life.states == {"of-the-ranks": JobState.ENDED}


def test_an_elastic_restart_is_one_job_that_begins_anew() -> None:
    life = Life(1300.0)
    life.discover(ranks())
    life.discover(launcher())
    life.sample(5)
    life.discover(ranks(pid=200))
    assert life.states == {"of-the-ranks": JobState.STARTING}


def test_a_launcher_that_ends_is_a_job_that_has_ended() -> None:
    life = Life()
    life.discover(launcher())
    life.discover()
    (entry,) = life.snapshot.jobs.values()
    assert (entry.watch.state, entry.watch.message) == (JobState.ENDED, WAITS_NO_MORE)


def test_an_open_incident_goes_on_under_a_new_daemon_while_the_launcher_lives() -> None:
    life = waits()
    life.look_at()
    (incident,) = (entry.incident for entry in life.snapshot.jobs.values())

    def resumed(job_after_restart: Job) -> tuple[Life, Incident]:
        later = Life(life.now)
        later.discover(job_after_restart)
        later.resume(incident, living=job_after_restart)
        return later, later.saved[-1]

    same, went_on = resumed(launcher())
    assert same.states == {"of-the-launcher": JobState.STALLED}
    assert went_on.incident_id == incident.incident_id and went_on.closed_unix_seconds is None
    other, closed = resumed(ranks())
    assert other.states == {"of-the-ranks": JobState.STARTING}
    assert closed.closed_unix_seconds is not None


def test_a_watch_without_ranks_asks_for_a_lost_look_again() -> None:
    watch = job_watch.begin_watch(launcher(), 1000.0)
    watch, _ = detector.apply_sample(watch, {}, 1100.0, RULES)
    watch, actions = detector.apply_sample(watch, {}, 1101.0, RULES)
    assert watch.state is JobState.SUSPECTED and actions == ()
    for second in range(2, 400):
        watch, actions = detector.apply_sample(watch, {}, 1100.0 + second, RULES)
    assert watch.state is JobState.STALLED
    watch, _ = detector.apply_capture(watch, MotionCount(frozen=0, moving=1), 1500.0, RULES)
    assert watch.state is JobState.STALLED


# --- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "phrase"),
    [
        ({"socket": "silent", "peers": ("10.0.0.1",)}, "10.0.0.1 does not answer its connection request (SYN_SENT)"),
        ({"socket": "connected", "peers": ("10.0.0.1",)}, "it is connected to 10.0.0.1"),
        ({"socket": "serving"}, ", which it serves; no other launcher is connected"),
        ({"socket": "serving", "peers": ("10.0.0.2", "10.0.0.3")}, "10.0.0.2 and 10.0.0.3 are connected"),
        (
            {"socket": "none"},
            "it has no connection there (no process serves it, its name has no address, or it has not tried yet)",
        ),
        ({}, "waits for other nodes at 10.0.0.1:29400. "),
    ],
)
def test_verdict_on_a_waiting_launcher_names_no_rank(shown: dict[str, object], phrase: str) -> None:
    waiting = replace(WAITING, seconds=900.0, **shown)
    verdict = judge.judge(Grouping(groups=(group(member(waiting)),)))
    assert (verdict.kind, verdict.named) == ("NoRanks", ())
    assert verdict.action.reason == "its launcher waits for nodes that have not joined: start them"
    head = "torchrun (pid 50 on n1, run id llama-7b, 2 nodes expected) has started no rank in 15 min 00 s"
    assert verdict.message.startswith(f"{head} and waits for other nodes at 10.0.0.1:29400")
    assert phrase in verdict.message


def test_a_launcher_of_one_node_waits_for_no_other() -> None:
    verdict = judge.judge(Grouping(groups=(group(member(Waiting(launcher="srun", seconds=61.0)), frames=()),)))
    assert verdict.message == "srun (pid 50 on n1) has started no rank in 1 min 01 s."
    assert verdict.action.kind == "wait"


def test_launchers_of_many_nodes_are_counted() -> None:
    verdict = judge.judge(Grouping(groups=(group(*(member(node=f"n{i}") for i in range(9))),)))
    assert verdict.kind == "NoRanks" and "and 5 other launchers" in verdict.message


def test_beside_ranks_of_other_nodes_a_launcher_is_evidence_and_no_rank() -> None:
    two = (Member(id=RankId(node="n2", rank=i), motion=Motion.FROZEN) for i in range(2))
    alone = Grouping(groups=(Group(key="r", activity="collective_wait", waits_for="ranks", members=tuple(two)),))
    both = replace(alone, groups=(*alone.groups, group(member())))
    verdict, without = judge.judge(both), judge.judge(alone)
    assert (verdict.kind, verdict.message, verdict.named) == (without.kind, without.message, without.named)
    assert [vote.kind for vote in verdict.evidence if vote not in without.evidence] == ["launcher"]


# --- real sockets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as server:
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def measured(port: int) -> Waiting:
    """Return the socket data of this process, as if it were a launcher."""
    me = identity(os.getpid())
    job = replace(launcher(replace(WAITING, endpoint=f"127.0.0.1:{port}")), launcher_id=me)
    began = me.start_ticks / procfs.TICKS_PER_SECOND
    youngest = time.monotonic() - began
    taken = capture(
        job,
        CaptureRequest(
            settings=config.Capture(rounds=1, dump_deadline_seconds=1.0),
            node="here",
            paths=NodePaths(pyspy_path=Path("/bin/false")),
        ),
    )
    (dump,) = taken.ranks
    assert dump.waiting is not None and dump.id == RankId(node="here", pid=os.getpid())
    assert dump.waiting.seconds is not None
    assert 0 < youngest <= dump.waiting.seconds <= time.monotonic() - began
    return dump.waiting


def test_launcher_that_is_the_only_client_of_its_endpoint_is_serving(listening: socket.socket) -> None:
    port = port_of(listening)
    with closing(socket.create_connection(("127.0.0.1", port))), closing(listening.accept()[0]):
        assert (measured(port).socket, measured(port).peers) == ("serving", ())


def test_a_request_to_connect_without_an_answer_is_seen(listening: socket.socket) -> None:
    """Fill the queue of a listener: it drops requests, like an absent node (listen(2), tcp_abort_on_overflow)."""
    port = port_of(listening)
    with ExitStack() as clients:
        for _ in range(3):
            client = clients.enter_context(closing(socket.socket()))
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        states = {one.state for one in sockets.sockets_at_port(port, os.getpid(), sockets.Tables(procfs.PROC)) or ()}
        assert sockets.SYN_SENT in states


@pytest.mark.parametrize(
    ("rows", "socket_state", "peers"),
    [
        ([("02", "10.0.0.5:5000", "10.0.0.1:29400")], "silent", ("10.0.0.1",)),
        ([("01", "10.0.0.5:5000", "10.0.0.1:29400")], "connected", ("10.0.0.1",)),
        ([], "none", ()),
        ([("01", "10.0.0.1:29400", "10.0.0.2:6000")], "none", ()),
        (
            [
                ("0A", "0.0.0.0:29400", "0.0.0.0:0"),
                ("01", "10.0.0.1:5000", "10.0.0.1:29400"),
                ("01", "10.0.0.1:29400", "10.0.0.1:5000"),
                ("01", "10.0.0.1:29400", "10.0.0.2:6000"),
            ],
            "serving",
            ("10.0.0.2",),
        ),
    ],
)
def test_what_sockets_tell(
    rows: list[tuple[str, str, str]], socket_state: str, peers: tuple[str, ...], tmp_path: Path
) -> None:
    pid = tmp_path / "50"
    (pid / "net").mkdir(parents=True)
    (pid / "fd").mkdir()
    (pid / "fd/0").symlink_to("/dev/null")
    table = "sl local remote st\n"
    foreign = ("02", "10.0.0.5:5001", "10.0.0.9:29400")
    for inode, (state, local, remote) in enumerate([*rows, foreign]):
        table += f"{inode}: {_hex(local)} {_hex(remote)} {state} 0:0 0:0 0 0 0 {900 + inode} 1\n"
        if inode < len(rows):
            (pid / f"fd/{inode + 3}").symlink_to(f"socket:[{900 + inode}]")
    (pid / "net/tcp").write_text(table)
    taken = capture(
        launcher(), CaptureRequest(settings=config.Capture(rounds=1), node="n1", paths=NodePaths(proc_root=tmp_path))
    )
    (dump,) = taken.ranks
    assert (dump.waiting.socket, dump.waiting.peers) == (socket_state, peers)


def _hex(end: str) -> str:
    address, _, port = end.partition(":")
    return f"{int.from_bytes(socket.inet_aton(address), 'little'):08X}:{int(port):04X}"


def test_every_answer_has_words() -> None:
    answers = ("serving", "connected", "silent", "none")
    said = {job_headlines.launcher(member(replace(WAITING, socket=answer, peers=("10.0.0.9",)))) for answer in answers}
    assert len(said) == 4 and not any("None" in one for one in said)
