"""The data of many nodes is merged into one job. The order of arrival does not matter."""

import io
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.json import decode, encode
from msgspec.structs import replace

from hangwatch import config
from hangwatch.formats import incident_file, sighting
from hangwatch.formats.sighting import Sighting
from hangwatch.model import EnqueuedOperation, Grouping, GroupRecords, Member, RankDump, RecorderFacts, RecorderState
from hangwatch.report import as_json
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.fleet import cross_node
from hangwatch.tools.fleet.merge import SightingCollector
from hangwatch.verdict import judge
from tests import samples
from tests.unit.test_grouping import jobs

TABLE = activity.load()
SETTINGS = config.Capture()
JOB = samples.job(range(4), None)
LAWS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def seen(node: str, grouping: Grouping, at: float = 0.0, key: str = "k") -> Sighting:
    return Sighting(node=node, job=replace(JOB, job_key=key), opened_unix_seconds=at, grouping=grouping)


def nodes_of(dumps: list[RankDump]) -> list[Sighting]:
    names = sorted({dump.id.node or "" for dump in dumps})
    return [
        seen(name, group_ranks([dump for dump in dumps if dump.id.node == name], TABLE, SETTINGS)) for name in names
    ]


def gathered(sightings: list[Sighting]) -> SightingCollector:
    gathering = SightingCollector()
    for one in sightings:
        gathering.add(decode(encode(one), type=Sighting))  # separate values, as from a file
    return gathering


@LAWS
@given(jobs(), st.randoms(use_true_random=False))
def test_nodes_in_any_order_are_all_ranks_grouped(dumps: list[RankDump], chance: random.Random) -> None:
    sightings = nodes_of(dumps)
    if not sightings:
        return
    shuffled = list(sightings)
    chance.shuffle(shuffled)
    merged = gathered(shuffled).merge_jobs(["k"])
    assert merged == gathered(sightings).merge_jobs(["k"]) == group_ranks(dumps, TABLE, SETTINGS)
    assert judge.judge(merged) == judge.judge(group_ranks(dumps, TABLE, SETTINGS))


@LAWS
@given(jobs(), st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_the_newest_of_each_node_counts(dumps: list[RankDump], times: list[float], chance: random.Random) -> None:
    every = [replace(one, opened_unix_seconds=at) for one in nodes_of(dumps) for at in (times[0], 3.0, *times[1:])]
    if not every:
        return
    shuffled = list(every)
    chance.shuffle(shuffled)
    merged = gathered(shuffled).merge_jobs(["k"])
    assert merged.groups == group_ranks(dumps, TABLE, SETTINGS).groups
    nodes = len({one.node for one in every})
    assert any(f"{8 * nodes} older incidents of" in note for note in merged.notes)


def test_of_equal_age_the_order_still_changes_nothing() -> None:
    one, other = (seen("a", samples.SAMPLES[name]().grouping) for name in ("loader", "mismatch"))
    assert gathered([one, other]).merge_jobs(["k"]) == gathered([other, one]).merge_jobs(["k"])


def recorded(rank: int, number: int) -> Member:
    done = EnqueuedOperation(
        number=number,
        operation="all_reduce",
        order=number,
        created_unix_seconds=0.5,
        stays_open=True,
        dtypes=("Float",),
        sizes=((4, 4),),
    )
    group = GroupRecords(library="nccl", name="0", description="default_pg", number=number, operations=(done,))
    return replace(
        samples.member(rank), recorder=RecorderFacts(libraries=(RecorderState(library="nccl", groups=(group,)),))
    )


def test_equal_values_are_held_once_and_stay_equal() -> None:
    group = replace(samples.waiting([0, 1]), members=(recorded(0, 7), recorded(1, 7)))
    whole = Grouping(groups=(group,), world_size=2)
    merged = gathered([seen("a", whole)]).merge_jobs(["k"])
    assert merged == whole
    first, second = (member.recorder.libraries[0].groups[0].operations[0] for member in merged.members)
    assert first.sizes is second.sizes
    assert first.operation is second.operation


def at_line(line: int) -> Sighting:
    group = samples.waiting([line])
    innermost, *others = group.frames
    group = replace(group, frames=(replace(innermost, line=line), *others))
    return seen(f"node{line:04}", Grouping(groups=(group,), world_size=None))


def calls_of_one_more(known_nodes: int) -> int:
    """Return the number of function calls, also of C functions, that adding one node to `known_nodes` nodes needs."""
    gathering, calls = SightingCollector(), 0
    for line in range(known_nodes):
        gathering.add(at_line(line))
    last = at_line(known_nodes)

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        gathering.add(last)
    finally:
        sys.setprofile(None)
    return calls


def test_adding_a_node_costs_the_same_beside_many_other_lines() -> None:
    assert 0 < calls_of_one_more(400) <= 2 * calls_of_one_more(4)


def test_what_does_not_fit_together_is_said() -> None:
    here = Grouping(groups=(samples.waiting([0, 1], node="a"),), world_size=4)
    there = Grouping(groups=(samples.waiting([1, 2], node="b"),), world_size=8)
    gathering = gathered([seen("a", here, at=samples.OPENED), seen("b", there, at=samples.OPENED + 7200)])
    merged = gathering.merge_jobs(["k"])
    assert merged.world_size == 8
    notes = "\n".join(merged.notes)
    for said in ("2 h 00 min", "two hangs", "4 on a; 8 on b", "rank 1 is on more than one node: a,b"):
        assert said in notes
    assert gathering.nodes("k") == {"a", "b"}


def test_odd_ranks_that_share_a_node_are_said() -> None:
    calm = [samples.waiting(range(8 * node, 8 * node + 8), node=f"n{node}") for node in range(7)]
    mixed = [samples.waiting(range(56, 60), node="n7"), samples.loading([60, 61, 62, 63])]
    odd = replace(mixed[1], members=tuple(replace(m, id=replace(m.id, node="n7")) for m in mixed[1].members))
    grouping = gathered(
        [seen(f"n{number}", Grouping(groups=(group,), world_size=64)) for number, group in enumerate(calm)]
        + [seen("n7", Grouping(groups=(mixed[0], odd), world_size=64))]
    ).merge_jobs(["k"])
    verdict = cross_node.judge(grouping)
    assert [rank.rank for rank in verdict.named] == [60, 61, 62, 63]
    (vote,) = [one for one in verdict.evidence if one.kind == "shared_node"]
    assert vote.message == "all 4 suspects are on n7; its 4 other ranks are not suspects"
    assert not [one for one in judge.judge(grouping).evidence if one.kind == "shared_node"]


def test_silent_nodes_and_clock_offsets_are_evidence_and_name_no_rank() -> None:
    grouping = Grouping(groups=(samples.waiting(range(8), node="n0"),), world_size=24)
    clocks = [cross_node.ClockOffset(node="n0", seconds=-3.5)]
    verdict = cross_node.judge(grouping, None, unanswered=["n1", "n2"], clocks=clocks)
    told = {one.kind: one.message for one in verdict.evidence}
    assert "no response from 2 nodes (n[1-2])" in told["unanswered_nodes"]
    assert "the clock of n0 is at least 3.5 s behind" in told["clocks"]
    assert verdict.named == ()


def read(content: bytes, tmp_path: Path) -> sighting.GroupedDump:
    path = tmp_path / "incident.json"
    path.write_bytes(content)
    with path.open("rb") as file:
        return sighting.read(path, file)


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_what_merging_reads_of_an_incident_is_what_the_model_reads(name: str, tmp_path: Path) -> None:
    incident = samples.SAMPLES[name]()
    content = incident_file.encode(incident)
    (found,) = read(content, tmp_path).jobs
    assert (found.node, found.grouping, found.job.key) == (incident.node, incident.grouping, incident.job.key)
    sorted_keys = json.dumps(json.loads(content), sort_keys=True, indent=1).encode()
    assert read(sorted_keys, tmp_path).jobs == (found,)
    grouped = sighting.make_grouped_dump(incident.node, [incident], 5.0)
    assert read(encode(grouped), tmp_path) == decode(encode(grouped), type=sighting.GroupedDump)


def test_only_the_head_of_an_incident_is_read(tmp_path: Path) -> None:
    content = incident_file.encode(samples.loader_hang())
    path = tmp_path / "incident.json"
    path.write_bytes(content)
    with path.open("rb") as file:
        head = incident_file.read_head(file)
    assert head is not None
    assert 2 * len(head) < len(content)
    assert "captures" not in json.loads(head)
    assert json.loads(head)["grouping"] == json.loads(content)["grouping"]


def test_text_of_a_job_ends_no_head(tmp_path: Path) -> None:
    incident = samples.loader_hang()
    named = replace(incident, job=replace(incident.job, command='x ,"captures":[ y', environ={"captures": "[]"}))
    (found,) = read(incident_file.encode(named), tmp_path).jobs
    assert found.job.command == named.job.command
    assert found.grouping == incident.grouping


def test_a_newer_incident_is_refused_by_its_last_field(tmp_path: Path) -> None:
    newer = replace(samples.loader_hang(), schema_version=99, hangwatch_version="9.0")
    with pytest.raises(incident_file.StoreError, match=r"hangwatch 9\.0 in form 99"):
        read(incident_file.encode(newer), tmp_path)


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    content = incident_file.encode(samples.loader_hang())
    with pytest.raises(incident_file.StoreError, match="truncated"):
        read(content[:-100], tmp_path)


def test_a_dump_without_groups_says_what_to_type() -> None:
    content = json.dumps({"schema_version": as_json.SCHEMA_VERSION, "node": "a", "jobs": [{"job": None}]}).encode()
    with pytest.raises(incident_file.StoreError, match="is a dump without --grouped"):
        sighting.parse(Path("x.json"), io.BytesIO(content).getvalue())


def test_grouped_dump_of_schema_2_is_refused_and_names_the_remedy() -> None:
    dump = sighting.make_grouped_dump("a", [samples.loader_hang()], 1.0)
    content = encode(replace(dump, schema_version=2))
    with pytest.raises(
        incident_file.StoreError, match=r"of another version of hangwatch\n.*, and install the same version"
    ):
        sighting.parse(Path("x.json"), content)
