"""The fleet rule, compared with the daemon's judgment of sequence numbers for the same jobs.

Each job is on two nodes. promtool evaluates the rule on the series that the nodes export. The expected result is
that of `wait_graph` on all ranks. A rule cannot decide every case (docs/adr/026-fleet-rule.md): it may report
nothing, but it never names a different rank.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from hangwatch import words
from hangwatch.collectives import wait_graph
from hangwatch.collectives.wait_graph import Stance
from hangwatch.detector import job_watch
from hangwatch.model import Frame, Group, Grouping, GroupRecords, JobState, Member, RecorderFacts, Stack
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict import sequence_rules
from hangwatch.verdict.sequence_rules import Answer, stance_of
from tests import samples
from tests.conftest import wait_for
from tests.deploy import promql
from tests.recorder_jobs.started import KEY, started
from tests.unit.test_waitfor import WORLD, Numbers, done, member, record, recorder, standing, waits

NODES = ("node-a", "node-b")
WAITS_FOR: dict[Stance, str] = {"elsewhere": "nothing", "held": "lock", "waits": "ranks", "unclear": "thread"}
SINCE_1970 = 1_790_000_000.0
STEP = Frame(function="step", file="train.py", line=7)
SAVER = (Stack(name="Saver", frames=(STEP,), activity="checkpoint"),)
DONE_AND_AWAY: tuple[Stance, ...] = ("waits", "elsewhere", "elsewhere")
JOBS = 160
JOBS_AT_ONCE = 40  # promtool takes 10,000 samples per query; no setting raises the limit
ASKED_FOR = (
    "hangwatch_rank_",
    "hangwatch_job_collective_",
    "hangwatch_job_activity_ranks",
    "hangwatch_job_info",
    "hangwatch_job_ranks",
)


class Case(NamedTuple):
    """A job: its ranks and the state of each rank. The first half of the ranks is on the first of two nodes."""

    key: str
    members: tuple[Member, ...]
    stances: tuple[Stance, ...]
    world_size: int | None
    nodes: tuple[str, ...] = NODES

    def on(self, node: str) -> Grouping:
        """Return the ranks on one node, grouped."""
        return self._grouping([one for one in self._placed() if one[0].id.node == node])

    def whole(self) -> Grouping:
        """Return all ranks of both nodes, grouped."""
        return self._grouping(self._placed())

    def _placed(self) -> list[tuple[Member, Stance]]:
        half = (len(self.members) + 1) // 2
        return [
            (
                replace(later(one), id=replace(one.id, node=self.nodes[len(self.nodes) * (place >= half) // 2])),
                stance,
            )
            for place, (one, stance) in enumerate(zip(self.members, self.stances, strict=True))
        ]

    def _grouping(self, placed: Iterable[tuple[Member, Stance]]) -> Grouping:
        groups = (
            Group(
                key="a",
                activity="unknown",
                waits_for=WAITS_FOR[stance],
                frames=(STEP,),
                members=(one,),
                threads=SAVER
                if any(group.thread for found in one.recorder.libraries for group in found.groups)
                else (),
            )
            for one, stance in placed
        )
        return Grouping(groups=tuple(groups), world_size=self.world_size)


def later(member: Member) -> Member:
    """Return the rank with its record times moved from 1970 to this century, where the rule expects them."""

    def moved(records: GroupRecords) -> GroupRecords:
        operations = (
            replace(done, created_unix_seconds=done.created_unix_seconds + SINCE_1970) for done in records.operations
        )
        return replace(records, operations=tuple(operations))

    recorded = (
        replace(
            found,
            oldest_unix_seconds=found.oldest_unix_seconds and found.oldest_unix_seconds + SINCE_1970,
            groups=tuple(map(moved, found.groups)),
        )
        for found in member.recorder.libraries
    )
    return replace(member, recorder=replace(member.recorder, libraries=tuple(recorded)))


def exported(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the series that its nodes export about the job."""
    for node in case.nodes:
        grouping = case.on(node)
        job = replace(samples.job(range(len(grouping.members)), case.world_size, job_id=case.key), job_key=case.key)
        incident = replace(samples.all_waiting(), job=job, grouping=grouping, state=JobState.HUNG)
        entry = JobEntry(job=job, watch=job_watch.begin_watch(job, 0.0), page=True, incident=incident)
        for family in samples.metric_families(Snapshot(jobs={case.key: entry})):
            for sample in family.samples:
                if sample.name.startswith(ASKED_FOR) and "job_key" in sample.labels:
                    labels = {"job": "hangwatch", "instance": node, **sample.labels}
                    value = f"{sample.value:.9f}".rstrip("0").rstrip(".")
                    yield {"series": promql.sample(sample.name, **labels)["labels"], "values": f"{value}x2"}


def complaints(cases: Sequence[Case], folder: Path) -> str:
    """Return promtool's report of the wrong results of the rule. It is empty if all are right."""
    tests = []
    for first in range(0, len(cases), JOBS_AT_ONCE):
        part = cases[first : first + JOBS_AT_ONCE]
        queries = [
            {"expr": expr, "eval_time": "10s", "exp_samples": rows} for expr, rows in expected_series(part).items()
        ]
        series = [one for case in part for one in exported(case)]
        tests.append({"interval": "5s", "input_series": series, "promql_expr_test": queries})
    return promql.promtool(tests, folder)


def expected_series(cases: Sequence[Case]) -> dict[str, list[dict[str, Any]]]:
    """Return the results that the rule must give, by PromQL expression."""
    named, check_first, kinds = [], [], []
    for case in cases:
        answer = answer_of(case)
        kind = kind_of(case, answer)
        named += [promql.sample("", job_key=case.key, rank=str(rank)) for rank in answer.named]
        looks = () if kind in ("", "Mismatch") else answer.check_first
        check_first += [promql.sample("", job_key=case.key, rank=str(rank)) for rank in looks]
        kinds += [promql.sample("", job_key=case.key, kind=kind)] if kind else []
    return {
        "group by (job_key, rank) (hangwatch:not_joined_rank:number)": named,
        "group by (job_key, rank) (hangwatch:check_first_rank:number)": check_first,
        "group by (job_key, kind) (hangwatch:job_sequence:count)": kinds,
    }


def answer_of(case: Case) -> Answer:
    whole = case.whole()
    return sequence_rules.decide(wait_graph.build(whole.members, stance_of(whole), whole.world_size))


def kind_of(case: Case, answer: Answer) -> str:
    """Return the kind of the result that the rule must give, or "" if the rule cannot decide."""
    missing = {rank for pending in answer.graph.pending for rank in pending.missing}
    if answer.named:
        return "NotJoined"
    if answer.kind == "Mismatch":
        return "Mismatch"
    if answer.kind == "Cycle":
        behind = {rank for pending in answer.graph.pending if pending.missing for rank in pending.waiting}
        return "Cycle" if missing <= behind else ""
    if answer.kind == "NotJoined" and answer.check_first:
        (*_, stance) = [case.stances[rank] for rank in answer.check_first]
        return "CheckFirst" if stance != "unclear" or len(missing) == 1 else ""
    if answer.kind == "AllJoined" and not answer.is_still_open:
        return "AllJoined" if len({one.name for one in answer.graph.pending}) == 1 else ""
    return ""


def drawn(seed: int) -> Case:
    """Return a random job that hangs. Its recorders may have any defect: wrapped, unread, created twice."""
    chance = random.Random(seed)
    size = chance.choice([4, 4, 6])
    numbers: list[dict[str, tuple[int, int]]] = [{WORLD: (6, 6)} for _ in range(size)]
    stances: list[Stance] = ["waits"] * size
    odd = chance.randrange(size)
    match chance.choice(["late", "late", "cycle", "all", "alone", "anything"]):
        case "late":
            for rank in {odd, chance.randrange(size)}:
                numbers[rank] = chance.choice([{WORLD: (5, 6)}, {WORLD: (4, 5)}, {}, {WORLD: (5, 5)}])
                stances[rank] = chance.choice(["elsewhere", "elsewhere", "held", "unclear", "waits"])
        case "cycle":
            numbers[odd] = {WORLD: (5, 6), str(1 + odd // 2): (3, 3)}
            numbers[odd ^ 1] = {WORLD: (6, 6), str(1 + odd // 2): (2, 3)}
        case "alone":
            numbers = [{WORLD: (5, 6), str(1 + rank // 2): chance.choice([(2, 2), (2, 3)])} for rank in range(size)]
            stances[odd] = chance.choice(["elsewhere", "unclear"])
        case "anything":
            for rank in range(size):
                newest = chance.choice([4, 5, 6])
                numbers[rank] = {WORLD: (newest, chance.choice([newest - 1, newest, newest + 1]))}
                stances[rank] = chance.choice(["elsewhere", "held", "unclear", "waits", "waits"])
    members = []
    for rank in range(size):
        one = standing(rank, numbers[rank])
        if chance.random() < 0.08:
            one = chance.choice(
                [
                    replace(one, recorder=replace(one.recorder, libraries=())),
                    member(rank, recorder(record(6, id=0), record(6, id=1, group_id=5, state="open"))),
                    member(rank, recorder(record(6, operation="gloo:all_gather", state="open"))),
                    member(rank, recorder(record(900, "9", created_unix_ns=-100 * 10**9), is_wrapped=True)),
                    member(rank, recorder(record(900, "9", created_unix_ns=900 * 10**9), is_wrapped=True)),
                ]
            )
        members.append(one)
    return Case(f"k{seed}", tuple(members), tuple(stances), chance.choice([size, size, size, None]))


def test_fleet_rule_names_the_ranks_that_the_daemon_names(tmp_path: Path) -> None:
    cases = [drawn(seed) for seed in range(JOBS)]
    drawn_kinds = Counter(kind_of(case, answer_of(case)) for case in cases)
    assert min(drawn_kinds[kind] for kind in ("NotJoined", "CheckFirst", "Cycle", "Mismatch", "AllJoined", "")) >= 3
    assert complaints(cases, tmp_path) == ""


def four(last: Numbers, stance: Stance = "elsewhere", *, key: str = "k1") -> Case:
    """Return a job of four ranks. Ranks 0 to 2 wait in collective 6 of the default group.

    Rank 3 has these numbers and this stance. Rank 3 is on the second node.
    """
    members = (*(standing(rank, waits(6)) for rank in range(3)), standing(3, last))
    return Case(key, members, ("waits", "waits", "waits", stance), 4)


def odd_ranks(cases: Sequence[Case], odd: dict[str, tuple[int, ...]], folder: Path, *more: dict[str, Any]) -> str:
    """Run the rule on these jobs. Return promtool's report if it names other ranks than `odd`, by job key."""
    rows = [promql.sample("", job_key=key, rank=str(rank)) for key, ranks in odd.items() for rank in ranks]
    expr = "group by (job_key, rank) (hangwatch:odd_rank:held)"
    series = [*(one for case in cases for one in exported(case)), *more]
    queries = [{"expr": expr, "eval_time": "10s", "exp_samples": rows}]
    return promql.promtool([{"interval": "5s", "input_series": series, "promql_expr_test": queries}], folder)


def saving(rank: int, numbers: Numbers, saved: Numbers) -> Member:
    """Return a rank of which a thread uses the group in `saved`, the main thread those in `numbers`."""
    both = standing(rank, {**numbers, **saved})

    def by_thread(records: GroupRecords) -> GroupRecords:
        operations = tuple(replace(one, by_main=False) for one in records.operations)
        return replace(records, thread=SAVER[0].name, operations=operations) if records.name in saved else records

    (gloo,) = both.recorder.libraries
    recorded = replace(gloo, groups=tuple(map(by_thread, gloo.groups)))
    return replace(both, recorder=replace(both.recorder, libraries=(recorded,)))


def test_thread_that_has_not_joined_is_no_cycle(tmp_path: Path) -> None:
    """Rank 0 waits for its save in the background, and others for rank 0. A thread of rank 3 still writes."""
    behind = saving(0, done(5), waits(3, "7"))
    others = [saving(rank, waits(6), waits(3, "7")) for rank in (1, 2)]
    cases = [
        Case("k1", (behind, *others, saving(3, waits(6), done(2, "7"))), ("waits",) * 4, 4),
        Case("k2", (behind, *others, standing(3, {**waits(6), **done(2, "7")})), ("waits",) * 4, 4),
        Case("k3", (behind, *others, saving(3, done(5), done(2, "7"))), ("waits",) * 4, 4),
    ]
    assert [(answer_of(case).kind, answer_of(case).named) for case in cases[:2]] == [("NotJoined", (3,)), ("Cycle", ())]
    assert answer_of(cases[2]).named == ()
    assert complaints(cases, tmp_path) == ""
    assert odd_ranks(cases, {"k1": (3,)}, tmp_path) == ""


def test_rank_on_another_node_that_has_not_joined_is_named(tmp_path: Path) -> None:
    cases = [four(done(5)), four({}, key="k2"), four({"7": (3, 4)}, key="k3"), four(waits(6), key="k4")]
    assert [answer_of(case).named for case in cases] == [(3,), (3,), (3,), ()]
    assert complaints(cases, tmp_path) == ""
    assert odd_ranks(cases, {"k1": (3,), "k2": (3,), "k3": (3,)}, tmp_path) == ""


def test_all_ranks_of_a_series_are_named(tmp_path: Path) -> None:
    """Nodes merge up to eight ranks into one series. The second node has two such series of ranks that have not joined."""
    members = [standing(rank, waits(6) if rank < 10 else done(5)) for rank in range(20)]
    case = Case("k1", tuple(members), ("waits",) * 10 + ("elsewhere",) * 10, 20)
    assert answer_of(case).named == tuple(range(10, 20))
    assert complaints([case], tmp_path) == ""


def test_edges_that_are_seldom_drawn(tmp_path: Path) -> None:
    waiting: tuple[Stance, ...] = ("waits", "waits", "waits")
    three = tuple(standing(rank, waits(6)) for rank in range(3))
    other = member(3, recorder(record(6, operation="gloo:all_gather", state="open")))
    late = standing(3, done(5))
    in_both = {WORLD: (6, 6), "1": (3, 3)}
    pair = (standing(0, {WORLD: (10, 10), "1": (10, 11)}), standing(1, {WORLD: (9, 10), "1": (11, 11)}))
    third = standing(2, {WORLD: (10, 11), "1": (11, 11)})
    cases = [
        Case("differs", (*three, other, standing(4, done(5))), (*waiting, "waits", "elsewhere"), 5),
        Case("elsewhere", (*pair, standing(2, waits(10))), ("waits", "elsewhere", "waits"), 3),
        Case(
            "company", (*pair, third, *(standing(rank, waits(10)) for rank in (3, 4))), (*waiting, "waits", "waits"), 5
        ),
        Case("both", tuple(standing(rank, in_both) for rank in range(2)), ("waits", "waits"), 2),
        Case("outnumbered", (standing(0, waits(6)), standing(1, done(5)), standing(2, done(5))), DONE_AND_AWAY, 3),
        Case("twice", (*three[:2], late, three[2], late), ("waits", "waits", "elsewhere", "waits", "elsewhere"), 4),
    ]
    kinds = {case.key: kind_of(case, answer_of(case)) for case in cases}
    assert kinds == {
        "differs": "Mismatch",
        "elsewhere": "CheckFirst",
        "company": "Cycle",
        "both": "",
        "outnumbered": "",
        "twice": "",
    }
    assert complaints(cases, tmp_path) == ""


def test_what_has_been_overwritten_is_not_known_and_the_stacks_stand(tmp_path: Path) -> None:
    """Name rank 0 by its stack: new records may have overwritten that rank 3 has joined."""
    kept = record(900, "9", created_unix_ns=900 * 10**9)
    last = member(3, recorder(kept, is_wrapped=True))
    stands: tuple[Stance, ...] = ("elsewhere", "waits", "waits", "waits")
    unread = tuple(replace(standing(rank, waits(6)), recorder=RecorderFacts(libraries=())) for rank in range(3))
    cases = [
        Case(
            "k1", (*(standing(rank, waits(6)) for rank in range(3)), last), ("waits", "waits", "waits", "elsewhere"), 4
        ),
        Case("k2", (*unread, last), stands, 4),
    ]
    assert complaints(cases, tmp_path) == ""
    assert odd_ranks(cases, {"k1": (3,), "k2": (0,)}, tmp_path) == ""


def test_rank_that_has_joined_is_not_named_by_its_stack(tmp_path: Path) -> None:
    """Name none: rank 3 has joined, and rank 2, which could not be read, perhaps has not."""
    members = [standing(rank, waits(6)) for rank in range(4)]
    members[2] = replace(members[2], recorder=replace(members[2].recorder, libraries=()))
    stands: tuple[Stance, ...] = ("waits", "waits", "waits", "elsewhere")
    come = Case("k1", tuple(members), stands, 4)
    alone = Case("k2", (*(standing(rank, done(5)) for rank in range(3)), standing(3, waits(6))), stands, 4)
    assert odd_ranks([come, alone], {"k2": (3,)}, tmp_path) == ""


def test_stopped_rank_is_named_by_its_node_although_all_have_joined(tmp_path: Path) -> None:
    """Name rank 3, which has joined: by the verdict of its node it is stopped."""
    case = four(waits(6))
    labels = 'job="hangwatch",instance="node-b",job_id="k1",job_key="k1",verdict="RankStopped",named="node-b:3"'
    word = {"series": f"hangwatch_incident_info{{{labels}}}", "values": "1x2"}
    assert odd_ranks([case], {}, tmp_path) == ""
    assert "rank=" in odd_ranks([case], {}, tmp_path, word), "it has joined, but its stack differs"
    assert odd_ranks([case], {"k1": (3,)}, tmp_path, word) == ""


def test_two_worlds_in_one_job_are_not_compared(tmp_path: Path) -> None:
    # Both nodes have a rank 0 and a rank 1, so the job has two worlds.
    members = (standing(0, waits(6)), standing(1, waits(6)), standing(0, waits(3)), standing(1, done(2)))
    case = Case("k1", members, ("waits", "waits", "waits", "waits"), 2)
    assert answer_of(case).kind == "Unknown"
    assert complaints([case], tmp_path) == ""


def wrong_group() -> Case:
    """Return a job in which rank 1 calls all_reduce in its pair, the others in the default group."""
    members = (
        standing(0, {WORLD: (10, 10), "1": (10, 11)}),
        standing(1, {WORLD: (9, 10), "1": (11, 11)}),
        standing(2, {WORLD: (10, 10), "2": (10, 11)}),
        standing(3, {WORLD: (10, 10), "2": (10, 11)}),
    )
    return Case("k1", members, ("waits",) * 4, 4)


NOT_JOINED = """\
Stuck on: rank 3 on node-b, which is in step (train.py:7)
Do first: `sudo hangwatch dump --job k1 --full` on node-b
Since: 1970-01-01 00:00:00 UTC; 3 of 4 ranks wait
Named:
  rank 3 on node-b: is in step (train.py:7)
By sequence numbers: NotJoined
  in all_reduce #6 of the default group: 3
  rank 3 on node-b has reached #5 in gloo:default_pg"""
CYCLE = """\
Stuck on: perhaps rank 1 on node-a
Do first: `sudo hangwatch dump --job k1 --full` on node-a
Since: 1970-01-01 00:00:00 UTC; 4 of 4 ranks wait
Named:
  no rank; check first: rank 1 on node-a
By sequence numbers: Cycle
  in all_reduce #11 of tp (gloo:1): 1
  in all_reduce #10 of the default group: 3
  rank 0 on node-a has reached #10 in gloo:1
  rank 1 on node-a has reached #9 in gloo:default_pg"""
ASYNCHRONOUS = """\
Stuck on: perhaps rank 3 on node-b
Do first: `sudo hangwatch dump --job k1 --full` on node-b
Since: 1970-01-01 00:00:00 UTC; 3 of 4 ranks wait
Named:
  no rank; check first: rank 3 on node-b
By sequence numbers: CheckFirst
  in all_reduce #6 of the default group: 3
  rank 3 on node-b has reached #5 in gloo:default_pg"""
ALL_JOINED = """\
Stuck on: all_reduce #6 of the default group, which all ranks have joined
Do first: `sudo hangwatch check xid nvlink_status infiniband network` on all its nodes
Since: 1970-01-01 00:00:00 UTC; 4 of 4 ranks wait
Named:
  no rank; there is no suspect on any node
By sequence numbers: AllJoined
  in all_reduce #6 of the default group: 4"""
OTHER = """\
Stuck on: not known
Do first: `sudo hangwatch dump --job k1` on its nodes
Since: 1970-01-01 00:00:00 UTC; 4 of 4 ranks wait
Named:
  no rank; there is no suspect on any node
By sequence numbers: Mismatch
  in all_gather #6 of the default group: 1
  in all_reduce #6 of the default group: 3"""


def other_operation(*nodes: str) -> Case:
    members = [standing(rank, waits(6)) for rank in range(3)]
    last = member(3, recorder(record(6, operation="gloo:all_gather", state="open")))
    return Case("k1", (*members, last), ("waits",) * 4, 4, nodes)


@pytest.mark.parametrize(
    ("case", "summary", "missing_ranks"),
    [
        (four(done(5)), "rank 3 on node-b", NOT_JOINED),
        (wrong_group(), "no rank named; check rank 1 on node-a", CYCLE),
        (four({WORLD: (5, 6), "2": (3, 3)}), "no rank named; check rank 3 on node-b", ASYNCHRONOUS),
        (four(waits(6), "waits"), "no rank is late: check GPUs, network", ALL_JOINED),
        (other_operation(*NODES), "no rank named: different operations", OTHER),
        (
            other_operation("node-a"),
            "no rank named: different operations",
            OTHER.replace("there is no suspect on any node", "check first, by the verdict of node-a alone: node-a:3"),
        ),
    ],
    ids=["not_come", "cycle", "check_first", "everybody", "mismatch", "mismatch_on_one_node"],
)
def test_page_names_the_rank_that_has_not_joined(case: Case, summary: str, missing_ranks: str, tmp_path: Path) -> None:
    series = list(exported(case))
    for node in case.nodes:
        labels = f'job="hangwatch",instance="{node}",job_id="k1",job_key="k1"'
        series += [
            {"series": f'up{{job="hangwatch",instance="{node}"}}', "values": "1x2"},
            {"series": f'hangwatch_job_state{{{labels},state="hung"}}', "values": "1x2"},
            {"series": f'hangwatch_job_page{{{labels},state="hung"}}', "values": "1x2"},
        ]
    description = f"{missing_ranks}\nWhere the ranks are:\n  4 \N{MULTIPLICATION SIGN} other code in step (train.py)\nReported: 4 of 4 ranks on {words.count(len(case.nodes), 'monitored node')}."
    if len(case.nodes) == 1:
        says = f'{labels},verdict="Mismatch",confidence="none",check_first="node-a:3",summary="Check rank 3 first"'
        series.append({"series": f"hangwatch_incident_info{{{says}}}", "values": "1x2"})
        description += "\n  node-a reports Mismatch, confidence none: Check rank 3 first"
        description += "\n  Report: `sudo hangwatch report --job k1` on node-a (the job's owner: without sudo)"
    alert = {
        "exp_labels": {"severity": "critical", "job_id": "k1", "job_key": "k1"},
        "exp_annotations": {
            "summary": f"llama-70b of user mira (k1, Slurm job 2180718, train.py) is hung: {summary}",
            "description": description,
            "dashboard_url": "",
            "incident_url": "",
            "runbook_url": "docs/runbooks/HangwatchTrainingHung.md",
        },
    }
    page = {"eval_time": "10s", "alertname": "HangwatchTrainingHung", "exp_alerts": [alert]}
    assert promql.promtool([{"interval": "5s", "input_series": series, "alert_rule_test": [page]}], tmp_path) == ""


REAL = {
    "own_code": "NotJoined",
    "open_and_stuck": "CheckFirst",
    "wrong_group": "Cycle",
    "wrapped_over_a_rare_one": "",
}


@pytest.mark.torch
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", REAL)
def test_a_real_job_over_two_nodes(name: str, tmp_path: Path) -> None:
    """Use the jobs of waitfor.toml as if half of the ranks ran on a second node."""
    with started(name, tmp_path) as job:

        def settled() -> Case | None:
            grouping = job.look().grouping
            stance = stance_of(grouping)
            members = tuple(sorted(grouping.members, key=lambda one: one.id.sort_key()))
            case = Case(name, members, tuple(stance(member, "") for member in members), grouping.world_size)
            return case if kind_of(case, answer_of(case)) == REAL[name] else None

        case = wait_for(settled, f"{name} to be {REAL[name] or 'not known'}")
    assert answer_of(case).named == tuple(KEY[name].get("named", ()))
    assert complaints([case], tmp_path) == ""
