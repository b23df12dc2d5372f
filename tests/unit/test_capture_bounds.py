"""The order, limits and texts of a capture of processes in any state: a fake /proc, a shell script as py-spy."""

import json
import threading
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture.request import CaptureRequest, GpuSources, NodePaths
from hangwatch.capture.rounds import capture
from hangwatch.model import (
    Capture,
    Died,
    EndedProcess,
    Fault,
    GpuLevels,
    GpuSample,
    GpuSweep,
    GpuTraffic,
    Job,
    ProcessId,
    Rank,
    TrafficSweep,
    Worker,
)
from hangwatch.probes.process.pyspy import DumpMode
from tests.fake_pyspy import fake_pyspy
from tests.proc_tree import lay_out

ONCE = config.Capture(rounds=1, pause_seconds=0.1, parallel=1)
FIRST = 5_000_000  # above the kernel's PID_MAX_LIMIT: our signals reach no process


def stacks(function: str, thread_id: int = 1, name: str | None = "MainThread") -> str:
    frame = {"name": function, "filename": "train.py", "line": 3}
    return json.dumps([{"thread_name": name, "os_thread_id": thread_id, "active": True, "frames": [frame]}])


class Node:
    """A node with a fake py-spy that logs each call. Its ranks and workers exist only as files of a fake /proc."""

    def __init__(self, folder: Path, ranks: int = 2, workers: int = 0) -> None:
        self.folder, self.proc = folder, folder / "proc"
        every = 1 + workers
        self.pids = [FIRST + number for number in range(ranks * every)]
        lay_out("\n".join(f"{pid} (python3) S parent=1 start={pid}" for pid in self.pids), self.proc)
        for pid in self.pids:
            self.status(pid)
        self.job = Job(
            job_id="42",
            job_key="key of 42",
            launcher="torchrun",
            launcher_id=None,
            world_size=16,
            ranks=tuple(
                Rank(
                    id=identity(FIRST + number * every),
                    rank=8 + number,
                    local_rank=number,
                    gpu_uuids=(f"GPU-{number}", f"GPU-{number}b"),
                    workers=tuple(
                        Worker(id=identity(FIRST + number * every + 1 + worker), comm="pt_data_worker")
                        for worker in range(workers)
                    ),
                )
                for number in range(ranks)
            ),
        )

    def status(self, pid: int, *, uids: tuple[int, ...] = (1004,) * 4, inner: int = 1) -> None:
        shown = f"Name:\tpython3\nUid:\t{' '.join(map(str, uids))}\nNSpid:\t{pid}\t{inner}\nThreads:\t1\n"
        (self.proc / f"{pid}/status").write_text(shown)

    def state(self, pid: int, letter: str) -> None:
        stat = self.proc / f"{pid}/stat"
        stat.write_text(stat.read_text().replace(") S ", f") {letter} "))

    def pyspy(self, body: str = f"echo '{stacks('train')}'") -> Path:
        """Write the fake py-spy, a shell script. In `body`, $pid is the pid of the process to dump."""
        return fake_pyspy(self.folder, f'echo "$*" >> {self.folder}/calls\nfor pid; do :; done\n{body}')

    def take(
        self, program: Path, settings: config.Capture = ONCE, job: Job | None = None, **options: object
    ) -> Capture:
        paths = NodePaths(proc_root=self.proc, sys_root=self.folder, pyspy_path=program)
        request = CaptureRequest(node="here", settings=settings, paths=paths, **options)  # type: ignore[arg-type]
        return capture(job or self.job, request)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def identity(pid: int) -> ProcessId:
    return ProcessId(pid=pid, start_ticks=pid)


def faults(taken: Capture) -> list[Fault | None]:
    return [dump.fault for rank in taken.ranks for dump in rank.rounds]


# --- order and method ------------------------------------------------------------------------------------------------


def test_the_ranks_come_first_then_as_many_workers_of_each_as_may_be(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=2, workers=3)
    taken = node.take(node.pyspy(), replace(ONCE, max_workers_per_rank=2, rounds=2))
    asked = [int(call.rpartition(" ")[2]) - FIRST for call in node.calls]
    assert asked == [0, 4, 1, 2, 5, 6] * 2
    assert taken.job_id == "42"
    assert taken.job_key == "key of 42"
    assert taken.node == "here"
    assert taken.world_size == 16
    assert taken.rounds == 2
    assert [[worker.pid - FIRST for worker in rank.workers] for rank in taken.ranks] == [[1, 2], [5, 6]]
    assert {worker.comm for rank in taken.ranks for worker in rank.workers} == {"pt_data_worker"}
    assert taken.notes == ("2 of 6 worker processes were not dumped: max_workers_per_rank is 2",)


def test_a_process_that_is_two_workers_is_asked_once(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1, workers=1)
    (rank,) = node.job.ranks
    node.take(node.pyspy(), job=replace(node.job, ranks=(replace(rank, workers=rank.workers * 2),)))
    assert len(node.calls) == 2


@pytest.mark.parametrize(("may_pause", "calls"), [(True, 2), (False, 1)])
def test_process_is_not_paused_before_a_suspicion(tmp_path: Path, may_pause: bool, calls: int) -> None:
    node = Node(tmp_path, ranks=1)
    thread = node.proc / f"{FIRST}/task/{FIRST}"
    thread.mkdir(parents=True)
    (thread / "stat").write_text((node.proc / f"{FIRST}/stat").read_text())
    node.take(node.pyspy("echo 'Error: Failed to get stack traces' >&2; exit 1"), mode=DumpMode(may_pause=may_pause))
    assert len(node.calls) == calls


@pytest.mark.parametrize(("native", "most"), [(False, 3), (True, 1)])
def test_so_many_dumps_at_same_time_as_may_be_and_native_ones_alone(tmp_path: Path, native: bool, most: int) -> None:
    node = Node(tmp_path, ranks=6)
    running = f"{tmp_path}/running-$pid"
    until_others = f"until [ $(ls {tmp_path} | grep -c begun-) -ge {most} ]; do sleep 0.02; done"
    counted = f"ls {tmp_path} | grep -c running- >> {tmp_path}/counts"
    body = f"touch {running} {tmp_path}/begun-$pid; {until_others}; {counted}; rm {running}; echo '[]'"
    node.take(node.pyspy(body), replace(ONCE, parallel=3), mode=DumpMode(native=native))
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert (max(counts), len(counts)) == (most, 6)


def test_places_are_shared_and_given_back(tmp_path: Path) -> None:
    node, slots = Node(tmp_path, ranks=4), threading.Semaphore(1)
    running = f"{tmp_path}/running-$pid"
    body = f"touch {running}; ls {tmp_path} | grep -c running- >> {tmp_path}/counts; rm {running}; echo '[]'"
    node.take(node.pyspy(body), replace(ONCE, parallel=4), slots=slots)
    assert set((tmp_path / "counts").read_text().split()) == {"1"}
    assert (slots.acquire(blocking=False), slots.acquire(blocking=False)) == (True, False)


def test_dump_without_a_slot_before_the_round_deadline_is_a_fault(tmp_path: Path) -> None:
    node, slots = Node(tmp_path, ranks=1), threading.Semaphore(0)
    taken = node.take(node.pyspy(), replace(ONCE, round_deadline_seconds=0.2), slots=slots)
    (dump,) = taken.ranks[0].rounds
    assert dump.fault == Fault(
        subject=f"pid {FIRST}", reason="RoundDeadline", detail="the round was over before its turn came"
    )
    assert (dump.state, dump.state_after, dump.threads, dump.duration_seconds) == ("S", "S", (), 0.0)
    assert (node.calls, slots.acquire(blocking=False), taken.ranks[0].gone) == ([], False, False)


# --- bounds of a kept dump -------------------------------------------------------------------------------------------


def test_a_dump_comes_with_what_the_kernel_says_of_the_process(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    process = node.proc / str(FIRST)
    (process / "wchan").write_text("futex_wait_queue")
    (process / "stack").write_text("[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x100\n")
    (process / "io").write_text("rchar: 70\nwchar: 7\nread_bytes: 5\n")
    seen: list[tuple[float, Fault | None]] = []
    taken = node.take(node.pyspy(), observe_dump=lambda seconds, fault: seen.append((seconds, fault)))
    (dump,) = taken.ranks[0].rounds
    assert (dump.state, dump.state_after, dump.fault, dump.called) == ("S", "S", None, None)
    assert (dump.main.wchan, dump.io_bytes, dump.fetched_bytes) == ("futex_wait_queue", 77, 5)
    assert dump.kernel_stack == ("futex_wait_queue+0x60/0x90", "do_futex+0x100")
    assert dump.cpu_seconds is not None
    assert seen == [(dump.duration_seconds, None)]
    assert dump.duration_seconds is not None and 0 < dump.duration_seconds <= taken.duration_seconds < 60
    assert abs(taken.started_unix_seconds + taken.duration_seconds - (tmp_path / "calls").stat().st_mtime) < 30


@pytest.mark.parametrize(("inner", "active"), [(77, None), (FIRST, True)], ids=["pod", "node"])
def test_main_thread_is_found_by_its_own_pid_and_its_state_only_outside_of_pods(
    tmp_path: Path, inner: int, active: bool | None
) -> None:
    node = Node(tmp_path, ranks=1)
    node.status(FIRST, inner=inner)
    (dump,) = node.take(node.pyspy(f"echo '{stacks('train', inner, None)}'")).ranks[0].rounds
    assert [(thread.is_main, thread.active) for thread in dump.threads] == [(True, active)]


def test_what_is_no_dump_is_a_fault_of_the_tool(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    (dump,) = node.take(node.pyspy("echo 'Process 7: python'")).ranks[0].rounds
    assert dump.fault is not None and dump.threads == ()
    assert (dump.fault.subject, dump.fault.reason, dump.fault.about) == (f"pid {FIRST}", "BadDump", "tool")
    assert "py-spy dump --json" in dump.fault.detail
    assert (dump.state_after, dump.duration_seconds is None) == ("S", False)


@pytest.mark.parametrize("letter", ["Z", "X"])
def test_ended_rank_is_not_dumped_and_has_a_fault(tmp_path: Path, letter: str) -> None:
    node = Node(tmp_path)
    node.state(FIRST, letter)
    seen: list[Fault | None] = []
    taken = node.take(node.pyspy(), observe_dump=lambda _, fault: seen.append(fault))
    gone, there = taken.ranks
    assert (gone.gone, there.gone, len(node.calls), seen) == (True, False, 1, [None])
    assert faults(taken)[0] == Fault(
        subject=f"pid {FIRST}", reason="ProcessGone", detail="the process has ended", about="target"
    )


def test_rank_that_ends_during_its_dump_is_gone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    taken = node.take(node.pyspy(f"[ $pid = {FIRST} ] && rm -r {node.proc}/$pid; echo '{stacks('train')}'"))
    assert [(rank.gone, rank.rounds[0].state, rank.rounds[0].state_after) for rank in taken.ranks] == [
        (True, "S", None),
        (False, "S", "S"),
    ]


def test_capture_without_rounds_says_nothing_about_ranks(tmp_path: Path) -> None:
    node = Node(tmp_path, workers=1)
    taken = node.take(node.pyspy(), rounds=0)
    assert taken.rounds == 0
    assert [(rank.gone, rank.rounds, rank.workers) for rank in taken.ranks] == [(False, (), ())] * 2


@pytest.mark.parametrize(
    ("reader", "uids", "is_shown"),
    [
        (1004, (1004, 1004, 1004, 1004), True),
        (1004, (1004, 0, 0, 0), False),
        (1005, (1004, 1004, 1004, 1004), False),
        (None, (1004, 0, 0, 0), True),
        (0, (1004, 1004, 1004, 1004), True),
    ],
)
def test_unreadable_rank_is_not_taken(
    tmp_path: Path, reader: int | None, uids: tuple[int, ...], is_shown: bool
) -> None:
    node = Node(tmp_path, ranks=1)
    node.status(FIRST, uids=uids)
    taken = node.take(node.pyspy(), job=replace(node.job, uid=reader))
    (dump,) = taken.ranks[0].rounds
    assert (dump.fault is None, bool(dump.threads), len(node.calls)) == (is_shown, is_shown, is_shown)
    if dump.fault is not None:
        assert (dump.fault.subject, dump.fault.reason, dump.fault.about) == (f"pid {FIRST}", "AnotherUsers", "tool")
        assert "runs as another user than its job" in dump.fault.detail
        assert dump.fault.remedy == f"as root: py-spy dump --pid {FIRST}"
        assert dump.state == "S"


def test_what_becomes_anothers_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    becomes = f"sed -i 's/^Uid:.*/Uid:\\t1004\\t0\\t0\\t0/' {node.proc}/$pid/status; echo '{stacks('secret')}'"
    seen: list[Fault | None] = []
    taken = node.take(
        node.pyspy(becomes), job=replace(node.job, uid=1004), observe_dump=lambda _, fault: seen.append(fault)
    )
    (dump,) = taken.ranks[0].rounds
    assert dump.threads == ()
    assert (dump.fault.reason, dump.state, seen) == ("AnotherUsers", "S", [])


# --- GPU counters ----------------------------------------------------------------------------------------------------


def gpu(number: int, watts: float | None, ratio: float | None = None, mark: str = "") -> GpuSample:
    return GpuSample(index=number, uuid=f"GPU-{number}{mark}", power_watts=watts, utilization_ratio=ratio)


def sweep(*gpus: GpuSample) -> GpuSweep:
    return GpuSweep(taken_monotonic_seconds=0.0, taken_unix_seconds=0.0, gpus=gpus)


def test_numbers_are_means_over_the_sweeps_after_each_round_and_a_ranks_own_gpus(tmp_path: Path) -> None:
    node = Node(tmp_path)
    coming = iter(
        (
            sweep(gpu(0, 100.0, 1.0), gpu(0, 200.0, None, "b"), gpu(1, 500.0), gpu(9, 999.0)),
            None,
            sweep(gpu(0, 300.0, 0.0), gpu(0, None, 0.5, "b")),
        )
    )
    levels = {"GPU-0": GpuLevels(floor_watts=100.0, busy_watts=500.0), "GPU-9": GpuLevels(floor_watts=0, busy_watts=1)}
    taken = node.take(
        node.pyspy(),
        replace(ONCE, rounds=3),
        gpus=GpuSources(read_sweep=lambda: next(coming), levels=levels),
    )
    first, second = taken.ranks
    assert (first.gpu.power_watts, first.gpu.utilization_ratio, first.gpu.busy_power_ratio) == (200.0, 0.5, 0.25)
    assert (second.gpu.power_watts, second.gpu.utilization_ratio, second.gpu.busy_power_ratio) == (500.0, None, None)
    assert next(coming, "all asked for") == "all asked for"


def test_numbers_of_one_sweep_count_and_without_any_there_are_none(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    for gpus, watts in ((sweep(gpu(0, 70.0)), 70.0), (None, None)):
        (rank,) = node.take(node.pyspy(), gpus=GpuSources(read_sweep=partial(next, iter((gpus,))))).ranks
        assert (rank.gpu.power_watts, rank.gpu.utilization_ratio, rank.gpu.busy_power_ratio) == (watts, None, None)


def traffic(seconds: float, *carried: int) -> TrafficSweep:
    """Return a reading of two NVLink counters a GPU: its bytes in `carried`, and 0."""
    return TrafficSweep(
        gpus=tuple(
            GpuTraffic(index=number, uuid=f"GPU-{number}", taken_monotonic_seconds=seconds, nvlink_bytes=(count, 0))
            for number, count in enumerate(carried)
        )
    )


def test_links_are_read_once_a_round_and_each_rank_has_those_of_its_own_gpus(tmp_path: Path) -> None:
    node = Node(tmp_path)
    coming = iter((traffic(10.0, 100, 100), traffic(15.0, 600, 100), traffic(20.0, 1100, 100)))
    taken = node.take(
        node.pyspy(), replace(ONCE, rounds=3), gpus=GpuSources(read_sweep=sweep, read_traffic=lambda: next(coming))
    )
    rates = [(rank.gpu.nvlink_bytes_per_second, rank.gpu.pcie_bytes_per_second) for rank in taken.ranks]
    assert rates == [(100.0, None), (0.0, None)]
    assert next(coming, "all asked for") == "all asked for"


def test_link_traffic_that_failed_is_not_read_again_in_the_capture(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    asked: list[None] = []
    taken = node.take(
        node.pyspy(),
        replace(ONCE, rounds=3),
        gpus=GpuSources(read_sweep=sweep, read_traffic=lambda: asked.append(None)),
    )
    assert (len(asked), taken.rounds, taken.ranks[0].gpu.nvlink_bytes_per_second) == (1, 3, None)


# --- absent ranks and notes ------------------------------------------------------------------------------------------


def test_absent_ranks_have_a_number_only_where_those_present_agree_on_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    job = replace(node.job, absent_local_ranks=((4, 4), (6, 7)))
    absent = node.take(node.pyspy(), job=job).ranks[2:]
    assert [(rank.id.node, rank.id.rank, rank.id.local_rank, rank.id.pid, rank.gone) for rank in absent] == [
        ("here", 12, 4, None, True),
        ("here", 14, 6, None, True),
        ("here", 15, 7, None, True),
    ]
    first, second = node.job.ranks
    for other in (replace(second, rank=20), replace(second, rank=None), replace(second, local_rank=None)):
        ranks = node.take(node.pyspy(), job=replace(job, ranks=(first, other))).ranks[2:]
        agree = other.rank is None or other.local_rank is None
        assert [rank.id.rank for rank in ranks] == ([12, 14, 15] if agree else [None] * 3)


def test_absent_rank_keeps_pid_and_artifacts(tmp_path: Path) -> None:
    """Keep the pid of a dead rank: lines of the kernel's log name only a pid."""
    node, died = Node(tmp_path), Died(text="it was killed", unix_seconds=8.0)
    rank = EndedProcess(id=identity(FIRST + 40), rank=31, local_rank=4, gone_unix_seconds=9.0, died=died)
    worker = EndedProcess(id=identity(FIRST + 50), rank=14, local_rank=5, gone_unix_seconds=9.0, is_worker=True)
    job = replace(node.job, absent_local_ranks=((4, 5),), ended=(rank, worker))
    absent = node.take(node.pyspy(), job=job).ranks[2:]
    assert [(one.id.rank, one.id.local_rank, one.id.pid, one.died) for one in absent] == [
        (31, 4, FIRST + 40, died),
        (13, 5, None, None),
    ]


@pytest.mark.parametrize(("count", "is_told"), [(64, False), (65, True), (1023, True)])
def test_of_absent_ranks_the_first_64_are_listed(tmp_path: Path, count: int, is_told: bool) -> None:
    node = Node(tmp_path, ranks=1)
    taken = node.take(node.pyspy(), job=replace(node.job, absent_local_ranks=((1, count),)))
    assert len(taken.ranks) == 65
    note = f"{count:,} local ranks should be here and have no process: the first 64 are listed"
    assert taken.notes == ((note,) if is_told else ())


def test_notes_of_the_job_come_first(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1, workers=2)
    settings = replace(ONCE, max_workers_per_rank=0)
    taken = node.take(node.pyspy(), settings, job=replace(node.job, notes=("found by its name",)))
    assert taken.notes == ("found by its name", "2 of 2 worker processes were not dumped: max_workers_per_rank is 0")


def test_workers_up_to_the_bound_are_no_news(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=2, workers=2)
    assert node.take(node.pyspy(), replace(ONCE, max_workers_per_rank=2)).notes == ()


def test_ranks_stopped_during_the_capture_are_listed_with_kill_cont(tmp_path: Path) -> None:
    """List only the ranks that were stopped during the capture. The first rank was stopped before it."""
    node = Node(tmp_path, ranks=3)
    node.state(FIRST, "T")
    stops = f"sed -i 's/) [ST] /) T /' {node.proc}/$pid/stat; echo '{stacks('train')}'"
    taken = node.take(node.pyspy(stops))
    assert taken.notes == (
        f"stopped since the capture began: to let them run on, type: kill -CONT {FIRST + 1} {FIRST + 2}",
    )


def test_interrupted_capture_keeps_dumps_and_marks_the_rest(tmp_path: Path) -> None:
    node, stop = Node(tmp_path, ranks=2), threading.Event()
    settings = replace(ONCE, rounds=3, pause_seconds=60.0)
    taken = node.take(node.pyspy(), settings, stop=stop, observe_dump=lambda *_: stop.set())
    assert (taken.rounds, taken.duration_seconds < 30) == (1, True)
    assert taken.notes == ("the capture was interrupted after 1 rounds: hangwatch was asked to stop",)
    done, left = taken.ranks
    assert done.rounds[0].fault is None
    assert left.rounds[0].fault == Fault(
        subject=f"pid {FIRST + 1}", reason="Interrupted", detail="hangwatch was asked to stop"
    )
    assert (left.rounds[0].state_after, left.gone, len(node.calls)) == ("S", False, 1)


def test_rounds_are_apart_by_the_pause_and_the_first_comes_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    taken = node.take(node.pyspy(), replace(ONCE, rounds=2, pause_seconds=0.5))
    first, second = (dump.taken_monotonic_seconds for dump in taken.ranks[0].rounds)
    assert second - first >= 0.5
    assert node.take(node.pyspy(), replace(ONCE, pause_seconds=30.0)).duration_seconds < 20
