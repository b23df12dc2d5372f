"""The processes of one owner displace no job of another user. A real scan reads trees like /proc."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture import diagnosis as look_module
from hangwatch.capture.job_scan import ENDPOINTS_PER_SCAN, JobScan
from hangwatch.config import Settings
from hangwatch.daemon import Daemon
from hangwatch.daemon.dead_ranks import MOST_DEAD_JOBS
from hangwatch.detector import TakeCapture, job_watch
from hangwatch.detector.known_pauses import Pause
from hangwatch.jobs import discovery as jobs
from hangwatch.jobs import owners
from hangwatch.jobs.discovery import find_jobs
from hangwatch.model import FoundJobs, GpuSweep, Job, JobState, NotMonitored, Process, ProcessId, Rank
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.network import sockets
from hangwatch.probes.process import process_scan
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.schedule.owner_limits import FairQueue
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.on_scan import ENDED_SHOWN_PER_SHARE
from hangwatch.state.steps import ReadCrashArtifacts, record_scan
from hangwatch.web.connection_limits import MOST_CALLERS, MOST_LOGGED, ConnectionLimits, Rate, caller_at
from tests.proc_tree import lay_out, sweep

VICTIM, HOSTILE = 1004, 65534
FIRST_FAKE = 5000


def rank(pid: int, uid: int, port: int, number: int = 0, size: int = 2, more: str = "") -> str:
    slot = f"RANK={number} LOCAL_RANK={number} WORLD_SIZE={size} MASTER_ADDR=node1 MASTER_PORT={port}"
    lines = [f"{pid} (python) S parent=1 start={pid}", " $ python train.py", f" + {slot} TORCHELASTIC_RUN_ID=r{port}"]
    return "\n".join([*lines, f" + {more}" if more else "", f" @ uid={uid} /user.slice", ""])


def victim(pid: int = 9000) -> str:
    return rank(pid, VICTIM, 29400) + rank(pid + 1, VICTIM, 29400, 1)


def fakes(count: int, more: str = "LOCAL_WORLD_SIZE=2") -> str:
    return "".join(rank(FIRST_FAKE + number, HOSTILE, 30000 + number, more=more) for number in range(count))


def look(text: str, root: Path, gpus: GpuSweep | None = None, **limits: int) -> FoundJobs:
    lay_out(f"1 (init) S parent=0 start=1\n{text}", root)
    return find_jobs(ProcessScan(root).processes(), gpus, limits=config.Jobs(**limits))


def test_user_over_the_job_limit_keeps_its_oldest_jobs(tmp_path: Path) -> None:
    found = look(fakes(100) + victim(), tmp_path, max_jobs_per_owner=10)
    by_owner = {owner: [job for job in found.jobs if job.owner == owner] for owner in ("uid 1004", "uid 65534")}
    assert [len(job.ranks) for job in by_owner["uid 1004"]] == [2]
    pids = {rank.id.pid for job in by_owner["uid 65534"] for rank in job.ranks}
    assert pids == set(range(FIRST_FAKE, FIRST_FAKE + 10))
    assert found.left_out == (NotMonitored(owner="uid 65534", jobs=90, ranks=90),)


def test_what_is_left_of_the_node_s_share_goes_to_the_owners_in_turn(tmp_path: Path) -> None:
    found = look(fakes(100) + victim(), tmp_path, max_jobs=4)
    assert sorted({job.owner for job in found.jobs}) == ["uid 1004", "uid 65534"]
    assert len(found.jobs) == 4


def test_job_on_a_gpu_is_kept_first(tmp_path: Path) -> None:
    on_gpu = FIRST_FAKE + 70
    found = look(fakes(100), tmp_path, sweep({0: (on_gpu,)}), max_jobs_per_owner=1)
    assert [rank.id.pid for job in found.jobs for rank in job.ranks] == [on_gpu]


def test_ranks_over_the_limit_of_a_job_are_left_out_and_it_says_so(tmp_path: Path) -> None:
    text = "".join(rank(FIRST_FAKE + number, HOSTILE, 30000, number, 64) for number in range(40))
    found = look(text, tmp_path, sweep({0: (FIRST_FAKE + 39,)}), max_ranks_per_job=8)
    (job,) = found.jobs
    assert [one.rank for one in job.ranks] == [0, 1, 2, 3, 4, 5, 6, 39]
    assert "8 of 40 ranks on this node are monitored" in job.notes[0]
    assert found.left_out == (NotMonitored(owner="uid 65534", ranks=32),)


def test_ranks_of_an_owner_are_limited_over_all_its_jobs(tmp_path: Path) -> None:
    found = look(fakes(100) + victim(), tmp_path, max_ranks_per_owner=20)
    assert sum(len(job.ranks) for job in found.jobs if job.owner == "uid 65534") == 20


def test_a_gpu_that_another_owner_holds_is_not_had_by_saying_so(tmp_path: Path) -> None:
    text = fakes(1, "CUDA_VISIBLE_DEVICES=0") + victim()
    found = look(text, tmp_path, sweep({0: (9000,), 1: ()}))
    assert {job.owner: job.gpu_uuids for job in found.jobs} == {"uid 65534": (), "uid 1004": ("GPU-a0", "GPU-a1")}


@pytest.mark.parametrize("size", [1_048_577, 4_000_000, 10**30])
def test_a_world_that_is_too_large_is_not_believed_and_that_is_said(size: int, tmp_path: Path) -> None:
    (job,) = look(rank(FIRST_FAKE, HOSTILE, 1, 0, size) + rank(5001, HOSTILE, 1, 1, size), tmp_path).jobs
    assert (job.world_size, len(job.ranks)) == (None, 2)
    assert "WORLD_SIZE = " in job.notes[0] and "is ignored: must be at most 1,048,576" in job.notes[0]


def test_a_local_world_that_is_too_large_is_not_believed(tmp_path: Path) -> None:
    (job,) = look(rank(FIRST_FAKE, HOSTILE, 1, 0, 9000, "LOCAL_WORLD_SIZE=5000"), tmp_path).jobs
    assert (job.local_world_size, job.absent_local_ranks) == (None, ())
    assert "LOCAL_WORLD_SIZE = 5000" in job.notes[0]


def test_a_scan_reads_so_many_of_each_owner_and_gpu_holders_always(tmp_path: Path) -> None:
    lay_out(f"1 (init) S parent=0 start=1\n{fakes(100)}{victim()}", tmp_path)
    scan = ProcessScan(tmp_path)
    found = scan.processes({FIRST_FAKE + 99}, share_of=lambda one: owners.owner_of(one).share, max_per_owner=16)
    read = {one.id.pid for one in found if one.environ}
    assert read == {*range(FIRST_FAKE, FIRST_FAKE + 16), FIRST_FAKE + 99, 9000, 9001}
    assert dict(scan.unread) == {"uid 65534": 83}


def test_a_scan_without_time_reads_gpu_holders_and_says_what_it_did_not_read(tmp_path: Path) -> None:
    lay_out(f"1 (init) S parent=0 start=1\n{fakes(20)}{victim()}", tmp_path)
    scan = ProcessScan(tmp_path)
    found = scan.processes({9000, 9001}, budget_seconds=0.0)
    assert {one.id.pid for one in found if one.environ} == {9000, 9001}
    assert sum(scan.unread.values()) == 20
    assert len([one for one in scan.processes() if one.environ]) == 22, "the next scan goes on"


def test_a_chain_of_processes_is_climbed_a_bounded_way(tmp_path: Path) -> None:
    chain = "".join(f"{pid} (python) S parent={pid - 1} start=2\n" for pid in range(2, 1002))
    lay_out(f"1 (init) S parent=0 start=1\n{chain}", tmp_path)
    tree = jobs.Tree(ProcessScan(tmp_path).processes())
    last = tree.get(1001)
    assert last is not None
    assert len(list(tree.ancestors(last))) == 64


class Queue(FairQueue[str]):
    """A queue of which the test does the work: `begun` are the calls for other threads, `done` the items."""

    def __init__(self, most_per_owner: int) -> None:
        self.begun: list[Callable[[], None]] = []
        self.done: list[str] = []
        super().__init__(most_per_owner, self._note, self.begun.append)

    def do(self) -> str:
        self.begun.pop(0)()
        return self.done[-1]

    def _note(self, item: str) -> None:
        self.done.append(item)


def test_an_owner_with_many_captures_lets_others_go_first() -> None:
    turns = Queue(50)
    for number in range(50):
        turns.add("hostile", f"fake {number}")
    assert turns.do() == "fake 0"
    turns.add("victim", "job")
    assert [turns.do() for _ in range(3)] == ["job", "fake 1", "fake 2"]


def test_an_owner_never_has_all_threads() -> None:
    """The hostile owner has two running captures. Its third capture waits; the victim's capture does not wait."""
    began, ends, done = threading.Semaphore(0), threading.Semaphore(0), []

    def work(item: str) -> None:
        done.append(item)
        began.release()
        assert item == "job" or ends.acquire(timeout=10)

    with ThreadPoolExecutor(4) as pool:
        turns = FairQueue(2, work, pool.submit)
        for number in range(3):
            turns.add("hostile", f"fake {number}")
        assert began.acquire(timeout=10) and began.acquire(timeout=10)
        turns.add("victim", "job")
        assert began.acquire(timeout=10)
        assert sorted(done) == ["fake 0", "fake 1", "job"]
        ends.release()
        assert began.acquire(timeout=10), "one that waited begins now"
        assert done[-1] == "fake 2"
        ends.release(2)


def test_work_that_fails_lets_the_next_item_of_its_owner_begin() -> None:
    begun: list[Callable[[], None]] = []
    turns = FairQueue(1, lambda item: 1 / item, begun.append)
    turns.add("uid 1000", 0)
    turns.add("uid 1000", 0)
    for left in (2, 1):
        with pytest.raises(ZeroDivisionError):
            begun.pop(0)()
        assert len(begun) == left


def ended_job(number: int, share: str) -> JobEntry:
    one = Rank(id=ProcessId(pid=number, start_ticks=1), rank=0, local_rank=0)
    key = str(number)
    job = Job(job_id=key, launcher="plain", launcher_id=None, ranks=(one,), owner="uid 0", job_key=key, share=share)
    return JobEntry(job=job, watch=job_watch.begin_watch(job, 0.0, 0.0))


def test_jobs_that_ended_are_shown_a_bounded_number_of_a_pod_and_another_pods_stay() -> None:
    snapshot = Snapshot().with_job(ended_job(1000, "uid 0, mine"))
    for number in range(200):
        snapshot = snapshot.with_job(ended_job(number, "uid 0, a stranger's"))
    snapshot, _ = record_scan(snapshot, (), 1.0, 1.0)
    assert {entry.watch.state for entry in snapshot.jobs.values()} == {JobState.ENDED}
    assert len(snapshot.jobs) == ENDED_SHOWN_PER_SHARE + 1
    assert "1000" in snapshot.jobs


def test_captures_of_one_pod_let_those_of_another_go_first(tmp_path: Path) -> None:
    # The users of both pods have uid 0 on the node.
    gpus = NvmlSampler(sample_seconds=1.0, deadline_seconds=5.0)
    daemon = Daemon(Settings(store=config.Store(directory=str(tmp_path))), gpus, proc_root=tmp_path)
    for number, share in enumerate(("uid 0, a stranger's",) * 9 + ("uid 0, mine",)):
        daemon.board.put(Snapshot.with_job, ended_job(number, share))
    daemon._do([TakeCapture(job_key=str(number), reason="quiet") for number in range(10)])
    turns, captured = daemon.looking._turns, list[str]()
    turns._work = lambda queued: captured.append(queued.request.job_key)
    turns.do_next()
    turns.do_next()
    assert captured == ["0", "9"]


def test_dead_job_beyond_its_owners_limit_is_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpus = NvmlSampler(sample_seconds=1.0, deadline_seconds=5.0)
    daemon = Daemon(Settings(store=config.Store(directory=str(tmp_path))), gpus, proc_root=tmp_path)
    jobs = [ended_job(number, "uid 1000").job for number in range(MOST_DEAD_JOBS + 5)]
    daemon._do([ReadCrashArtifacts(job=job) for job in jobs])
    daemon._do([ReadCrashArtifacts(job=ended_job(99, "uid 2000").job)])
    assert daemon.board.snapshot.unread_crash_count == 5
    said = [record.message for record in caplog.records if "are not read" in record.message]
    assert len(said) == 3  # the 1st, the 2nd and the 4th
    assert said[0].startswith(
        f"{jobs[MOST_DEAD_JOBS].name.in_log}: crash artifacts of its dead ranks are not read: 16 jobs of"
    )


def test_the_share_of_a_job_tells_pods_of_one_user_apart(tmp_path: Path) -> None:
    # Two pods of one user have separate quotas of captures, hung py-spys and ended jobs.
    text = f"{pod_rank(5000, 'aaaaaaaaaaaa', 1)}{pod_rank(6000, 'bbbbbbbbbbbb', 2)}{victim()}"
    found = JobScan(lay_out(f"1 (init) S parent=0 start=1\n{text}", tmp_path)).find(None, "node1").jobs
    assert {job.share for job in found} == {"uid 0, aaaaaaaaaaaa", "uid 0, bbbbbbbbbbbb", f"uid {VICTIM}"}


def test_a_process_that_is_read_is_never_without_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the owner together with the process, even after the time limit: the scan keeps the process for good."""
    lay_out(f"1 (init) S parent=0 start=1\n{victim()}", tmp_path)
    clock = chain([0.0], repeat(1.5))
    monkeypatch.setattr(process_scan.time, "monotonic", lambda: next(clock))
    (first, second) = ProcessScan(tmp_path).processes(budget_seconds=2.0)[1:]
    assert {first.uid, second.uid} == {VICTIM}
    assert first.environ["RANK"] == "0"


def bare(pid: int, parent_pid: int, *cmdline: str, **environ: str) -> Process:
    return Process(
        id=ProcessId(pid=pid, start_ticks=pid),
        parent_pid=parent_pid,
        comm="python",
        state="S",
        cmdline=("python", *cmdline),
        environ=environ,
        uid=HOSTILE,
    )


def test_thousands_of_claimants_to_one_rank_cost_little() -> None:
    slot = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    parents = [bare(100 + 2 * number, 1, "x.py") for number in range(3000)]
    claimants = [bare(parent.id.pid + 1, parent.id.pid, "t.py", **slot) for parent in parents]
    began = time.process_time()
    assert len(find_jobs([bare(1, 0), *parents, *claimants]).jobs) == config.Jobs().max_jobs_per_owner
    assert time.process_time() - began < 4


def test_a_chain_of_spawned_processes_above_many_costs_little() -> None:
    chained = [bare(100 + number, 99 + number if number else 1, "multiprocessing.spawn") for number in range(1024)]
    leaves = [bare(2000 + number, chained[-1].id.pid) for number in range(30_000)]
    began = time.process_time()
    assert find_jobs([bare(1, 0), *chained, *leaves]).jobs == ()
    assert time.process_time() - began < 10


def pod_rank(pid: int, pod: str, port: int) -> str:
    place = f"/kubepods.slice/kubepods-pod{pod}.slice/c.scope"
    return rank(pid, 0, port).replace("@ uid=0 /user.slice", f"@ uid=0 {place}")


def asked_in(scan: JobScan, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    monkeypatch.setattr(sockets, "store_endpoint", lambda pid, *_: asked.append(pid))
    scan.find(None, "node1")
    return asked


def test_unconnected_ranks_do_not_delay_the_query_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = "".join(pod_rank(FIRST_FAKE + number, "aaaaaaaaaaaa", 30000 + number) for number in range(200))
    lay_out(f"1 (init) S parent=0 start=1\n{many}{pod_rank(9000, 'bbbbbbbbbbbb', 29400)}", tmp_path)
    scan = JobScan(tmp_path)
    rounds = [asked_in(scan, monkeypatch) for _ in range(4)]
    assert all(len(asked) == ENDPOINTS_PER_SCAN and 9000 in asked for asked in rounds)
    assert len({pid for asked in rounds for pid in asked}) == 201


@pytest.mark.parametrize("is_single", [False, True])
def test_asking_for_stores_ends_with_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_single: bool
) -> None:
    """Stop reading connections at the time limit: one table may have 32 MiB. The only scan of a command has more time."""
    many = "".join(pod_rank(FIRST_FAKE + number, "aaaaaaaaaaaa", 30000 + number) for number in range(200))
    lay_out(f"1 (init) S parent=0 start=1\n{many}", tmp_path)
    limits = config.Jobs(scan_budget_seconds=2.0)
    scan = JobScan(tmp_path, limits, is_single=is_single)
    scan.find(None, "node1")
    clock = count(0.0, 0.5)
    monkeypatch.setattr(look_module.time, "monotonic", lambda: next(clock))
    assert len(asked_in(scan, monkeypatch)) in (range(16, 24) if is_single else range(1, 8))


def test_known_pauses_of_a_pod_do_not_delay_pages_of_another_pod() -> None:
    # Users of uid 0 in two pods copy each other's variables, so that their jobs have the same key.
    def job(pid: int, pod: str) -> Job:
        return replace(ended_job(pid, f"uid 0, {pod}").job, job_id="100", job_key="k")

    taught = Pause(place="here", longest_seconds=900.0, seen_at=0.0)
    watch = replace(job_watch.begin_watch(job(1, "a"), 0.0, 0.0), pauses=(taught,))
    before, _ = record_scan(Snapshot(jobs={"k": JobEntry(job=job(1, "a"), watch=watch)}), (), 1.0, 1.0)
    for pod, pauses in (("a", (taught,)), ("b", ())):
        after, _ = record_scan(before, (job(2, pod),), 2.0, 2.0)
        assert after.jobs["k"].watch.state is JobState.STARTING
        assert after.jobs["k"].watch.pauses == pauses, pod


def test_of_one_owner_so_many_wait_for_their_turn() -> None:
    turns = Queue(1)
    assert [turns.add("uid 1000", str(number), 2) for number in range(4)] == [True, True, False, False]
    assert turns.add("uid 2000", "9", 2)
    assert turns.do() == "0"
    assert turns.add("uid 1000", "4", 2)


def test_caller_over_its_rate_is_refused_until_time_has_passed() -> None:
    limits = ConnectionLimits("one", Rate(at_once=3.0, per_second=2.0))
    assert [limits.begin(1, 10.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limits.begin(2, 10.0), "others are not"
    assert [limits.begin(1, 11.0) for _ in range(3)] == [True, True, False]
    assert [limits.begin(1, 1000.0) for _ in range(4)] == [True] * 3 + [False], "never more than at once"


def test_callers_without_number_are_bounded_together() -> None:
    limits = ConnectionLimits("one", Rate(at_once=100.0, per_second=2.0))
    allowed = sum(limits.begin(f"10.0.{number >> 8}.{number & 255}", 0.0) for number in range(2 * MOST_CALLERS))
    assert allowed == 2000 + 500
    assert len(limits._buckets) == MOST_CALLERS
    assert sum(limits.begin(number, 1.0) for number in range(MOST_CALLERS)) == 200 + 50


@pytest.mark.parametrize("addresses", [5, 248, 2000])
def test_caller_that_has_not_flooded_passes_beside_many_addresses_that_do(addresses: int) -> None:
    limits = ConnectionLimits("one", Rate(at_once=500.0, per_second=50.0))
    opened, scrapes = 0, []
    for tick in range(40_000):  # 1,000 a second
        number = tick % addresses
        opened += limits.begin(f"10.0.{number >> 8}.{number & 255}", tick / 1000)
        if tick % 15_000 == 9_000:
            scrapes.append(limits.begin("10.9.9.9", tick / 1000))
    assert scrapes == [True] * 3 and opened <= 2500 + 250 * 40


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 2.0)), max_size=200))
def test_any_caller_gets_no_more_than_its_rate(request_times: list[tuple[int, float]]) -> None:
    limits, rate = ConnectionLimits("one", Rate(5.0, 1.0)), Rate(5.0, 1.0)
    now, allowed = 0.0, dict.fromkeys(range(4), 0)
    for caller, later in request_times:
        now += later
        allowed[caller] += limits.begin(caller, now)
    assert all(count <= rate.at_once + rate.per_second * now + 1e-6 for count in allowed.values())


def test_refused_caller_is_logged_once_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    limits = ConnectionLimits("own-jobs", Rate(1.0, 1.0))
    for _ in range(3):
        limits.log_refused(1004, "too many")
        limits.log_refused("10.0.0.1", "too many")
    assert caplog.messages == [
        "own-jobs: connections of user 1004 are refused: too many",
        "own-jobs: connections of 10.0.0.1 are refused: too many",
    ]
    for uid in range(5000):
        limits.log_refused(uid, "too many")
    assert len(caplog.messages) == MOST_LOGGED
    assert caplog.messages[-1].endswith("further refused callers are not logged")


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("no:address", "no:address"),
    ],
)
def test_caller_of_an_address_is_its_host(address: str, caller: str) -> None:
    assert caller_at(address) == caller
