"""Faults while a flight recorder is read: kept per rank, reported once."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.model import Fault, Grouping, Incident, ProcessDump, RankDump, RankId, Verdict
from hangwatch.model.flight_records import RankRecords
from hangwatch.report import as_json, html, text
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from tests import samples
from tests.unit.test_waitfor import record, recorder

OFF = Fault(
    subject="pid 7 nccl",
    reason="RecorderOff",
    detail="the flight recorder is off: its buffer has no capacity",
    remedy="set TORCH_FR_BUFFER_SIZE=2000 in the job",
)
SILENT = Fault(subject="pid 7 gloo", reason="NoAnswer", detail="it did not respond")
NO_TORCH = Fault(subject="pid 7", reason="NoTorch", detail="it has not loaded torch")
TOLD = "no sequence numbers of ranks 0-2 on a in NCCL: the flight recorder is off: its buffer has no capacity"


def grouped(*faults: tuple[Fault, ...], records: tuple[RankRecords, ...] = ()) -> Grouping:
    ranks = [
        RankDump(
            id=RankId(node="a", rank=rank, pid=rank + 7),
            rounds=(
                ProcessDump(taken_monotonic_seconds=0.0, recorder_faults=(NO_TORCH,)),
                ProcessDump(taken_monotonic_seconds=1.0, recorder_faults=of_rank, recorders=records),
            ),
        )
        for rank, of_rank in enumerate(faults)
    ]
    return group_ranks(ranks, activity.load(), config.Capture())


def grouped_rounds(*rounds: ProcessDump) -> Grouping:
    one = RankDump(id=RankId(node="a", rank=0, pid=7), rounds=rounds)
    return group_ranks([one], activity.load(), config.Capture())


def notes_on(grouping: Grouping) -> list[str]:
    verdict = Verdict(kind="CannotTell", message="Nobody.")
    notes = [note for note in as_json.answer(grouping, verdict).notes if "sequence numbers" in note]
    said = " ".join(text.render_verdict(grouping, verdict).split())
    page = html.render_grouping(grouping, verdict)
    assert all(note in said and note in page for note in notes)
    assert ("no sequence numbers" in said) == ("no sequence numbers" in page) == bool(notes)
    return notes


def test_last_fault_of_all_ranks_is_reported_once_with_its_remedy() -> None:
    grouping = grouped((OFF,), (replace(OFF, subject="pid 8 nccl"),), (OFF,), (NO_TORCH,))
    assert grouping.members[0].recorder.faults == (OFF,)
    assert notes_on(grouping) == [f"{TOLD} (RecorderOff); set TORCH_FR_BUFFER_SIZE=2000 in the job"]


def test_verdict_lists_the_sources_that_it_did_not_have() -> None:
    unread = replace(OFF, reason="RecorderUnread", detail="torch 2.16.0 is unknown: no object in /l has the shape")
    grouping, verdict = grouped((unread,), (unread,)), Verdict(kind="CannotTell", message="Nobody.")
    incident = replace(next(iter(samples.SAMPLES.values()))(), grouping=grouping, verdict=verdict)
    job = replace(incident.job, ranks=(replace(incident.job.ranks[0], gpu_uuids=("GPU-0",)),))
    sources = "stacks of 2 ranks, GPU power"
    for shown in (text.render(replace(incident, job=job)), html.render(replace(incident, job=job))):
        assert f"flight recorder (torch 2.16.0 is unknown), {sources}" in " ".join(shown.split())
    assert "Without   stacks of 1 rank\n" in text.render_verdict(grouped(()), verdict)


def test_ranks_without_torch_have_no_fault() -> None:
    gone = replace(NO_TORCH, reason="ProcessGone")
    assert notes_on(grouped((NO_TORCH,), (gone,), ())) == []


@pytest.mark.parametrize("unread", range(3))
def test_failed_round_keeps_the_numbers_of_other_rounds(unread: int) -> None:
    rounds = [
        ProcessDump(taken_monotonic_seconds=float(number), recorders=(recorder(record(7, state="open")),))
        for number in range(3)
    ]
    rounds[unread] = ProcessDump(taken_monotonic_seconds=float(unread), recorder_faults=(SILENT,))
    (member,) = grouped_rounds(*rounds).members
    assert [
        operation.number for operation in member.recorder.libraries[0].groups[0].operations if operation.stays_open
    ] == [7]
    assert member.recorder.faults == ()


@pytest.mark.parametrize("unread", range(2))
def test_recorder_read_once_reports_only_its_fault(unread: int) -> None:
    rounds = [ProcessDump(taken_monotonic_seconds=0.0, recorders=(recorder(record(7, state="open")),))] * 2
    rounds[unread] = ProcessDump(taken_monotonic_seconds=1.0, recorder_faults=(SILENT,))
    grouping = grouped_rounds(*rounds)
    assert (grouping.members[0].recorder.libraries, grouping.members[0].recorder.faults) == ((), (SILENT,))
    assert notes_on(grouping) == ["no sequence numbers of rank 0 (a, pid 7) in gloo: it did not respond (NoAnswer)"]


def test_two_of_one_library_in_one_round_are_not_two_rounds() -> None:
    # Two recorders of one library in the same round do not show that a record stays open. That needs two rounds.
    twice = ProcessDump(taken_monotonic_seconds=0.0, recorders=(recorder(record(7, state="open")),) * 2)
    (member,) = grouped_rounds(twice, ProcessDump(taken_monotonic_seconds=1.0, recorder_faults=(SILENT,))).members
    assert (member.recorder.libraries, member.recorder.faults) == ((), (SILENT,))


def test_unread_one_of_two_recorders_has_its_fault() -> None:
    both = ProcessDump(taken_monotonic_seconds=0.0, recorders=(recorder(record(7)),), recorder_faults=(OFF,))
    (member,) = grouped_rounds(both, both).members
    assert [one.library for one in member.recorder.libraries] == ["gloo"]
    assert member.recorder.faults == (OFF,)


def test_faults_of_two_libraries_are_separate_and_bounded() -> None:
    gloo = replace(OFF, subject="pid 7 gloo", reason="UnknownLayout", detail="it fits in no known layout", remedy="")
    assert notes_on(grouped((OFF, gloo), (gloo,))) == [
        "no sequence numbers of rank 0 (a, pid 7) in NCCL: the flight recorder is off: its buffer has no capacity"
        " (RecorderOff); set TORCH_FR_BUFFER_SIZE=2000 in the job",
        "no sequence numbers of ranks 0-1 on a in gloo: it fits in no known layout (UnknownLayout)",
    ]
    many = grouped(*((replace(gloo, reason=f"Reason{number}"),) for number in range(9)))
    assert len(notes_on(many)) == 4


def test_incident_keeps_recorder_faults_and_old_ones_load() -> None:
    incident = replace(next(iter(samples.SAMPLES.values()))(), grouping=grouped((OFF,)))
    raw = msgspec.json.encode(incident)
    assert msgspec.json.decode(raw, type=Incident) == incident
    before = json.loads(raw)
    del before["grouping"]["groups"][0]["members"][0]["recorder"]["faults"]
    old = msgspec.json.decode(json.dumps(before).encode(), type=Incident)
    assert [member.recorder.faults for member in old.grouping.members] == [()]
