"""The status value of the daemon, and its board: late ranks, shared GPUs, pages of Ray jobs, past hangs."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import store
from hangwatch.collectives.arrival import ArrivalOrder, Place, list_collectives
from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.progress_gaps import ProgressRecord
from hangwatch.detector.watch_parts import Silence, Suspicion
from hangwatch.model import (
    ArrivalStatus,
    GpuSample,
    GpuSweep,
    Incident,
    Job,
    JobState,
    PastHang,
    ProcessId,
    Rank,
    RecommendedAction,
    SamplerStatus,
    TimelineEntry,
    Worker,
)
from hangwatch.model.flight_records import Library
from hangwatch.state import status, steps
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.hang_history import MOST_HANGS, MOST_HANGS_OF_USER, find_history, remember_hang, restore_hangs
from hangwatch.state.incident_timeline import update_timeline
from hangwatch.state.status import build_status
from hangwatch.state.unseen import list_unseen
from hangwatch.tools.commands.status_tables import status_text
from tests import samples
from tests.unit.test_waitfor import record as flight_record
from tests.unit.test_waitfor import recorder

UUID = "GPU-0"


def claimant(key: str, pid: int, *workers: int) -> Job:
    rank = Rank(
        id=ProcessId(pid=pid, start_ticks=pid),
        rank=0,
        local_rank=0,
        gpu_uuids=(UUID,),
        workers=tuple(Worker(id=ProcessId(pid=worker, start_ticks=worker), comm="python") for worker in workers),
    )
    return Job(job_id="100", job_key=key, launcher="torchrun", launcher_id=None, ranks=(rank,), owner=f"uid {key}")


def holders(jobs: tuple[Job, ...], pids: tuple[int, ...], ended: frozenset[str] = frozenset()) -> list[str]:
    entries = {}
    for job in jobs:
        watch = job_watch.begin_watch(job, 5.0, 0.0)
        entries[job.key] = JobEntry(job=job, watch=replace(watch, state=JobState.ENDED) if job.key in ended else watch)
    sweep = GpuSweep(
        taken_monotonic_seconds=6.0, taken_unix_seconds=1e9, gpus=(GpuSample(index=0, uuid=UUID, pids=pids),)
    )
    (gpu,) = build_status(Snapshot(sweep=sweep, jobs=entries), "n1", 7.0).gpus
    return [job.job_key for job in gpu.jobs]


@pytest.mark.parametrize("jobs", list(itertools.permutations((claimant("a1", 10, 11), claimant("b2", 20)))))
def test_of_two_jobs_that_claim_a_gpu_the_driver_knows_the_holder(jobs: tuple[Job, ...]) -> None:
    assert holders(jobs, (10,)) == holders(jobs, (11, 99)) == ["a1"]
    assert holders(jobs, (20,)) == ["b2"]
    assert sorted(holders(jobs, ())) == sorted(holders(jobs, (99,))) == ["a1", "b2"], (
        "the holder is unknown: both are listed"
    )
    assert sorted(holders(jobs, (10, 20))) == ["a1", "b2"], "they share it"


def test_a_job_that_ended_holds_nothing() -> None:
    assert holders((claimant("a1", 10),), (10,), frozenset({"a1"})) == []


@pytest.mark.parametrize(
    ("state", "closed", "shown"),
    [
        (JobState.HUNG, None, True),
        (JobState.RECOVERED, 1e9, True),
        (JobState.ENDED, 1e9, True),
        (JobState.QUIET, 1e9, False),
        (JobState.SUSPECTED, 1e9, False),
    ],
)
def test_new_silence_is_not_told_by_verdict_of_last_hang(state: JobState, closed: float | None, shown: bool) -> None:
    job = claimant("a1", 10)
    changes = {"job": job, "state": state, "closed_unix_seconds": closed, "message": "All ranks wait"}
    incident = samples.change_parts(samples.all_waiting(), incident_id="i1", **changes)
    entry = JobEntry(job=job, watch=replace(job_watch.begin_watch(job, 5.0, 0.0), state=state), incident=incident)
    (seen,) = build_status(Snapshot(jobs={job.key: entry}), "n1", 7.0).jobs
    was = "it works again; before: " if state is JobState.RECOVERED else ""
    assert (seen.verdict, seen.incident) == ((f"{was}All ranks wait", "i1") if shown else (None, None))


def entry(name: str, pid: int, *, has_counters: bool = True) -> JobEntry:
    job = replace(claimant(name, pid), job_id=name)
    progress = ProgressRecord(progressed_at=90.0 if has_counters else None)
    return JobEntry(job=job, watch=replace(job_watch.begin_watch(job, 0.0), progress=progress))


def sampled(*entries: JobEntry, pids: tuple[int, ...], mig_uuids: tuple[str, ...] = ()) -> Snapshot:
    gpu = GpuSample(index=0, uuid="GPU-0", power_watts=90.0, power_limit_watts=700.0, pids=pids, mig_uuids=mig_uuids)
    sweep = GpuSweep(taken_monotonic_seconds=100.0, taken_unix_seconds=1e9, gpus=(gpu,))
    board = Snapshot(jobs={each.job.key: each for each in entries})
    board, _ = steps.record_sample(
        board, sweep, SamplerStatus(alive=True), now=100.0, settings=Detector(), gap_seconds=1e9
    )
    return board


def with_power(board: Snapshot) -> list[str]:
    return [key for key, each in board.jobs.items() if each.watch.power.gpus]


def list_notes(board: Snapshot) -> list[str]:
    return [unseen.detail for unseen in list_unseen(board) if unseen.reason == "PowerShared"]


def test_power_of_a_shared_gpu_counts_for_no_job_with_counters() -> None:
    board = sampled(entry("a", 7), entry("b", 8), entry("c", 9, has_counters=False), pids=(7, 8, 9))
    assert with_power(board) == ["c"]
    assert list_notes(board)[0] == "power is shared with job b, c"


def test_instances_of_a_gpu_share_its_power() -> None:
    assert with_power(sampled(entry("a", 7), entry("b", 8), pids=(), mig_uuids=("MIG-1", "MIG-2"))) == []


def test_job_that_only_claims_a_gpu_shares_no_power() -> None:
    board = sampled(entry("a", 7), entry("b", 8), pids=(7,))
    assert with_power(board) == ["a", "b"] and list_notes(board) == []


RANKS = tuple(Rank(id=ProcessId(pid=100 + rank, start_ticks=1), rank=8 + rank, local_rank=rank) for rank in range(4))
JOB = Job(job_id="train", job_key="k1", launcher="torchrun", launcher_id=None, ranks=RANKS)
LATENESS = {rank.id: 0.004 if rank.rank == 10 else 0.0001 for rank in RANKS}


def make_order(library: Library = "gloo", **changes: object) -> ArrivalOrder:
    place = Place(library=library, group="0", operation="all_reduce", sizes=((8,),), position=0)
    order = ArrivalOrder(
        reason="",
        latest=RANKS[2].id,
        place=place,
        records=320,
        step_seconds=0.04,
        lateness_seconds=LATENESS,
        lateness_ratio=0.1,
        standard_errors=9.0,
        last_ratio=0.98,
    )
    return replace(order, **changes)


def record(*orders: ArrivalOrder) -> Snapshot:
    """Return a board with a job after these readings."""
    snapshot = Snapshot().with_job(JobEntry(job=JOB, watch=job_watch.begin_watch(JOB, 5.0)))
    for order in orders:
        snapshot = steps.record_arrival_orders(snapshot, {"k1": order})
    return snapshot


def shown(snapshot: Snapshot) -> ArrivalStatus:
    (job,) = status.build_status(snapshot, "n1", 10.0).jobs
    assert job.arrival is not None
    return job.arrival


def series(snapshot: Snapshot, name: str) -> dict[str, float]:
    """Return the values of a metric by rank, or by "" if it has no label for it."""
    families = samples.metric_families(snapshot, 10.0)
    found = (one for family in families for one in family.samples if one.name == name)
    return {one.labels.get("rank", ""): one.value for one in found}


def test_named_rank_is_shown_and_the_job_keeps_its_state() -> None:
    snapshot = record(make_order())
    assert shown(snapshot).is_named and shown(snapshot).ranks[0].rank == 10
    assert shown(snapshot).message == (
        "Rank 10 (pid 102) is late by 4 ms (10.0% of a step of 40 ms): it enqueues all_reduce of group 0 after the 3"
        " other ranks, last in 98% of 320 steps. With gloo this is all that the rank does in a step: loader, forward and"
        " backward pass."
    )
    assert series(snapshot, "hangwatch_job_straggler_lateness_ratio") == {"10": 0.1}
    assert series(snapshot, "hangwatch_job_step_seconds") == {"": 0.04}
    assert series(snapshot, "hangwatch_rank_lateness_seconds") == {"8": 0.0001, "9": 0.0001, "10": 0.004, "11": 0.0001}
    assert snapshot.jobs["k1"].watch == job_watch.begin_watch(JOB, 5.0) and not snapshot.jobs["k1"].page


def test_differences_of_the_named_rank_are_shown() -> None:
    said = ("its main thread waited 25% of the time for a core, those of the others at most 1%",)
    assert shown(record(make_order(differences=said))).differences == said


def test_status_tells_who_is_late() -> None:
    late = "rank 10 is late by 10% of each step"
    for order, count in ((make_order(), 1), (make_order(reason="NoneLate"), 0)):
        seen = status.build_status(record(order), "n1", 10.0)
        assert status_text(seen).count(late) == count


def test_place_within_the_step_is_said() -> None:
    order = make_order()
    message = shown(record(replace(order, place=replace(order.place, position=2)))).message
    assert "it enqueues all_reduce of group 0 (number 3 in the step) after the 3 other ranks" in message


def test_nccl_is_said_to_show_only_the_cpu() -> None:
    assert (
        "A slow GPU does not show here: see `hangwatch check gpu_speed`." in shown(record(make_order("nccl"))).message
    )
    assert "A slow GPU" not in shown(record(make_order("gloo"))).message


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (make_order(reason="NoneLate"), "No rank is late. The latest is rank 10 (pid 102), by 4 ms"),
        (make_order(reason="LateByRole"), "No rank is named: rank 10 (pid 102) is late by 4 ms"),
        (ArrivalOrder(reason="NoRecords"), "No rank can be compared"),
        (ArrivalOrder(reason="TooFewRecords", records=120), "120 of at least 300 at one place; the time is known"),
        (
            ArrivalOrder(reason="TooFewRecords", records=712),
            "712 records at one place, but of too short a time; the time",
        ),
        (ArrivalOrder(reason="TooFewRecords", records=9, ready_in_seconds=90), "at one place; enough in 1 min 30 s"),
    ],
)
def test_reason_without_a_name_is_said(order: ArrivalOrder, message: str) -> None:
    snapshot = record(order)
    assert message in shown(snapshot).message and not shown(snapshot).is_named
    assert series(snapshot, "hangwatch_job_straggler_lateness_ratio") == {}


def test_job_that_is_no_longer_read_loses_its_late_rank() -> None:
    snapshot = steps.record_arrival_orders(record(make_order()), {})
    assert snapshot.jobs["k1"].arrival_order is None
    assert series(snapshot, "hangwatch_rank_lateness_seconds") == {}


def test_collectives_are_those_of_the_newest_group_that_counts() -> None:
    read = recorder(
        flight_record(1, group_id=1),
        flight_record(2, group_id=3),
        flight_record(3, group_id=3, is_p2p=True),
        flight_record(4, group_id=3, is_coalesced_part=True),
        flight_record(5, "1", group_id=4),
        flight_record(6, "", group_id=5),
        flight_record(7, group_id=3),
    )
    assert [(one.group, one.number, one.operation) for one in list_collectives(read, {4})] == [
        ("0", 2, "all_reduce"),
        ("0", 7, "all_reduce"),
    ]
    assert [one.number for one in list_collectives(read, ())] == [2, 5, 7]


NOW = 10_000.0


def group(
    key: str, since: float, *, launcher: str = "ray", job_name: str = "01000000", named: bool = False
) -> JobEntry:
    job = replace(claimant(key, 100), launcher=launcher, job_name=job_name, share="u")
    suspicion, silence = Suspicion(saw_stacks=True, frozen_captures=9), Silence(since=0.0)
    watch = replace(
        job_watch.begin_watch(job, 0.0), state=JobState.HUNG, since=since, silence=silence, suspicion=suspicion
    )
    return JobEntry(job=job, watch=watch, incident=samples.loader_hang() if named else None)


def pages(*entries: JobEntry) -> list[str]:
    board = Snapshot(jobs={entry.job.key: entry for entry in entries})
    sweep = GpuSweep(taken_monotonic_seconds=NOW, taken_unix_seconds=1e9, gpus=())
    board, _ = steps.record_sample(board, sweep, SamplerStatus(), now=NOW, settings=Detector(), gap_seconds=1e9)
    return [key for key, entry in board.jobs.items() if entry.page]


def test_worker_groups_of_a_ray_job_page_once() -> None:
    assert pages(group("critic", 20.0), group("actor", 10.0)) == ["actor"]


def test_group_with_a_named_rank_pages_for_its_ray_job() -> None:
    assert pages(group("critic", 20.0, named=True), group("actor", 10.0)) == ["critic"]


def test_group_that_paged_before_goes_on_to_page() -> None:
    before = replace(group("critic", 20.0), page=True)
    assert pages(before, group("actor", 10.0, named=True)) == ["critic"]


def test_other_jobs_page_each() -> None:
    assert pages(group("a", 1.0, job_name="02000000"), group("b", 1.0)) == ["a", "b"]
    assert pages(group("a", 1.0, job_name=""), group("b", 1.0, job_name="")) == ["a", "b"]
    assert pages(group("a", 1.0, launcher="torchrun"), group("b", 1.0, launcher="torchrun")) == ["a", "b"]


SEEN = samples.OPENED + 60.0


def incident(**verdict: object) -> Incident:
    return samples.change_parts(samples.loader_hang(), fingerprint="aa", **verdict)


def hung_entry(state: JobState = JobState.HUNG, *, page: bool = False, of: Incident | None = None) -> JobEntry:
    found = of or incident()
    watch = replace(job_watch.begin_watch(found.job, 0.0), state=state)
    return JobEntry(job=found.job, watch=watch, page=page, incident=found)


def hang(number: int, opened: float = samples.OPENED - 60) -> PastHang:
    return PastHang(
        incident_id=f"i{number}",
        node="n",
        opened_unix_seconds=opened,
        uid=number % 20,
        fingerprint="aa",
        action="restart",
    )


def test_hung_job_is_remembered_once_with_its_last_verdict() -> None:
    snapshot = Snapshot()
    for kind in ("investigate", "restart"):
        snapshot = remember_hang(snapshot, incident(action=RecommendedAction(kind=kind)))
    (only,) = snapshot.past_hangs
    assert (only.incident_id, only.action, only.fingerprint) == (samples.loader_hang().incident_id, "restart", "aa")


def test_history_of_a_job_excludes_its_open_incident() -> None:
    snapshot = restore_hangs(remember_hang(Snapshot(), incident()), [hang(1)])
    assert len(snapshot.past_hangs) == 2
    history = find_history(snapshot, incident().job, incident(), "n", SEEN)
    assert [one.incident_id for one in history.hangs] == ["i1"]
    assert len(find_history(snapshot, incident().job, None, "n", SEEN).hangs) == 2


@given(st.lists(st.floats(0, 1e9), max_size=2 * MOST_HANGS, unique=True))
def test_board_keeps_the_newest_hangs(times: list[float]) -> None:
    hangs = [hang(number, at) for number, at in enumerate(times)]
    kept = restore_hangs(restore_hangs(Snapshot(), hangs[::2]), hangs[1::2]).past_hangs
    assert [one.opened_unix_seconds for one in kept] == sorted(times)[-MOST_HANGS:]


def test_one_user_cannot_displace_the_hangs_of_others() -> None:
    others = restore_hangs(Snapshot(), [replace(hang(0), uid=7)])
    flooded = restore_hangs(others, [replace(hang(number, 1e300), uid=8) for number in range(1, 1000)])
    assert [one.uid for one in flooded.past_hangs] == [7] + [8] * MOST_HANGS_OF_USER


def test_store_returns_the_incidents_that_were_hung(tmp_path: Path) -> None:
    kept = store.open_writable(tmp_path)
    line = TimelineEntry(unix_seconds=1.0, state=JobState.HUNG, message="m")
    hung = replace(incident(), timeline=(line,))
    quiet = replace(line, state=JobState.QUIET)
    other = replace(hung, incident_id=hung.incident_id.replace("03", "04", 1), timeline=(quiet,))
    for one in (hung, other):
        kept.save(one, {})
    (only,) = kept.past_hangs()
    assert only == remember_hang(Snapshot(), hung).past_hangs[0]


def test_incident_that_pages_does_not_recommend_to_wait() -> None:
    waits = incident(action=RecommendedAction(kind="wait", reason="known pause"))
    for page, expected in ((False, "wait"), (True, "investigate")):
        stepped, _ = update_timeline(hung_entry(page=page, of=waits), (), SEEN)
        assert stepped.incident is not None and stepped.incident.verdict.action.kind == expected
