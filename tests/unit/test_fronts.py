"""The ranks for which all others wait, by flight recorders of simulated jobs and of two real NCCL jobs."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from hangwatch.collectives import wait_graph
from hangwatch.collectives.rank_records import drop_unneeded, merge_rounds, read_single_round
from hangwatch.collectives.wait_graph import WaitGraph
from hangwatch.model import Member, RankId, RecorderFacts
from hangwatch.model.flight_records import FlightRecord, GroupMembers, GroupStatus, RankRecords, find_progressions
from hangwatch.tools.explain.flight_dumps import recorder_dump
from hangwatch.verdict.sequence_rules import Answer, decide
from tests.unit.test_waitfor import record, recorder

CREATED_NS = 1_700_000_000 * 10**9
REAL = Path(__file__).parents[3] / "shared" / "nccl-dumps"
KEPT = 40


class Operation(NamedTuple):
    """An operation in a program. `peers` are (sender, receiver) of a send or recv, as indexes in the group."""

    group: tuple[int, ...]
    name: str
    peers: tuple[int, int] | None = None

    @property
    def is_send(self) -> bool:
        return self.name == "send"


def make_program(rank: int, sizes: tuple[int, int, int], batches: int) -> list[Operation]:
    """Return a step of 1F1B on a grid of (pipeline, data, tensor) ranks. Each stage has an expert group."""
    pipeline, data, tensor = sizes
    stage, copy, _ = rank // (data * tensor), rank // tensor % data, rank % tensor
    across = data * tensor
    own = tuple(range(rank // tensor * tensor, rank // tensor * tensor + tensor))
    experts = tuple(range(stage * across, (stage + 1) * across))
    copies = tuple(stage * across + other * tensor + rank % tensor for other in range(data))

    def moved(name: str, sender: int, receiver: int) -> list[Operation]:
        if not (0 <= sender < pipeline and 0 <= receiver < pipeline):
            return []
        pair = tuple(sorted(rank % across + other * across for other in (sender, receiver)))
        return [Operation(pair, name, (0, 1) if sender < receiver else (1, 0))]

    middle = [
        Operation(own, "_all_gather_base"),
        Operation(experts, "all_to_all"),
        Operation(own, "_reduce_scatter_base"),
        Operation(own, "all_reduce"),
    ]
    forward = [*moved("recv", stage - 1, stage), *middle, *moved("send", stage, stage + 1)]
    backward = [*moved("recv", stage + 1, stage), *middle, *moved("send", stage, stage - 1)]
    ahead = min(batches, pipeline - stage - 1)
    order = forward * ahead + (forward + backward) * (batches - ahead) + backward * ahead
    whole = tuple(range(pipeline * across))
    ends = [Operation(copies, "_reduce_scatter_base"), Operation(whole, "all_reduce"), Operation(copies, "all_gather")]
    assert copy < data
    return [one for one in [*order, *ends] if len(one.group) > 1]


class Simulation:
    """Ranks with a CPU that enqueues ahead, and a GPU that completes in order; only sends let later operations pass.

    A program in `stopped` enqueues no operation from that place on. A GPU in `stuck` completes none from that place on,
    but its kernel at that place has sent its part, so the other members complete it.
    """

    def __init__(self, programs: Sequence[Sequence[Operation]], ahead: Sequence[int]) -> None:
        self.programs, self.ahead = programs, ahead
        self.enqueued = [0] * len(programs)
        self.completed: list[set[int]] = [set() for _ in programs]
        self.launched: list[set[int]] = [set() for _ in programs]
        self.low = [0] * len(programs)  # all operations before this place have completed, except sends
        groups = sorted({one.group for program in programs for one in program})
        self.names = {group: str(number) for number, group in enumerate(groups)}
        self.numbers: list[list[int]] = []
        self.places: list[dict[tuple[object, ...], int]] = []
        for program in programs:
            counts: dict[tuple[object, ...], int] = {}
            numbers: list[int] = []
            places: dict[tuple[object, ...], int] = {}
            for place, one in enumerate(program):
                key = one.group, one.peers
                counts[key] = counts.get(key, 0) + 1
                numbers.append(counts[key])
                places[one.group, one.peers, counts[key]] = place
            self.numbers.append(numbers)
            self.places.append(places)

    def run(
        self,
        stopped: dict[int, int],
        stuck: dict[int, int],
        limit: int | None = None,
        slow: Mapping[int, int] = MappingProxyType({}),
    ) -> bool:
        """Run until nothing moves, or for `limit` rounds. Return true if all programs have ended.

        A rank in `slow` enqueues and launches only in each n-th round.
        """
        ranks = range(len(self.programs))
        moved, rounds = True, 0
        while (moved or slow) and rounds != limit:
            moved, rounds = False, rounds + 1
            for rank in ranks:
                if rounds % slow.get(rank, 1):
                    continue
                end = min(stopped.get(rank, len(self.programs[rank])), self.low[rank] + self.ahead[rank] + 1)
                if end > self.enqueued[rank]:
                    self.enqueued[rank], moved = min(end, len(self.programs[rank])), True
                for place in range(self.low[rank], self.enqueued[rank]):
                    if place > stuck.get(rank, place):
                        break
                    self.launched[rank].add(place)
                    if place not in self.completed[rank] and not self.programs[rank][place].is_send:
                        break
            for rank in ranks:
                for place in sorted(self.launched[rank] - self.completed[rank]):
                    if stuck.get(rank) != place and self._has_all(rank, place):
                        self.completed[rank].add(place)
                        moved = True
                while self._is_passed(rank, self.low[rank]):
                    self.low[rank] += 1
        return all(low == len(program) for low, program in zip(self.low, self.programs, strict=True))

    def _is_passed(self, rank: int, place: int) -> bool:
        is_send = place in self.launched[rank] and self.programs[rank][place].is_send
        return is_send or place in self.completed[rank]

    def _has_all(self, rank: int, place: int) -> bool:
        one, number = self.programs[rank][place], self.numbers[rank][place]
        return all(self.places[member][one.group, one.peers, number] in self.launched[member] for member in one.group)

    def recorders(self) -> dict[int, tuple[RankRecords, ...]]:
        return {rank: (self._recorder(rank),) for rank in range(len(self.programs))}

    def _recorder(self, rank: int) -> RankRecords:
        groups = sorted({one.group for one in self.programs[rank]})
        first = max(0, min(self.low[rank], self.enqueued[rank] - KEPT))
        records = tuple(self._record(rank, place, groups) for place in range(first, self.enqueued[rank]))
        members = tuple(
            GroupMembers(name=self.names[group], description="group", ranks=find_progressions(group))
            for group in groups
        )
        read = recorder(
            *records,
            library="nccl",
            groups=tuple(self._status(rank, index, group) for index, group in enumerate(groups)),
            members=members,
            next_id=self.enqueued[rank],
            oldest_id=first,
            is_wrapped=first > 0,
            capacity=KEPT,
            layout="2.10",
            read_unix_seconds=CREATED_NS / 1e9 + 600.0,
        )
        return drop_unneeded(read)

    def _status(self, rank: int, index: int, group: tuple[int, ...]) -> GroupStatus:
        mine = [place for place in range(self.enqueued[rank]) if self.programs[rank][place].group == group]
        ended = [self.numbers[rank][place] for place in mine if place in self.completed[rank]]
        enqueued = max((self.numbers[rank][place] for place in mine), default=-1)
        return GroupStatus(
            group_id=index, last_enqueued=enqueued, last_started=-1, last_completed=max(ended, default=-1)
        )

    def _record(self, rank: int, place: int, groups: Sequence[tuple[int, ...]]) -> FlightRecord:
        one = self.programs[rank][place]
        mine = one.group.index(rank)
        peer = f" {mine}{'->' if one.is_send else '<-'}{1 - mine}" if one.peers else ""
        return record(
            self.numbers[rank][place],
            self.names[one.group],
            id=place,
            group_id=groups.index(one.group),
            group_description="group",
            p2p_seq=self.numbers[rank][place],
            op_id=place,
            is_p2p=one.peers is not None,
            operation=f"nccl:{one.name}{peer}",
            state="completed" if place in self.completed[rank] else "open",
            created_unix_ns=CREATED_NS + place * 10**6,
        )


def make_job(draw: random.Random, sizes: tuple[int, int, int]) -> Simulation:
    ranks, batches = sizes[0] * sizes[1] * sizes[2], draw.randint(sizes[0], 2 * sizes[0])
    programs = [make_program(rank, sizes, batches) * 2 for rank in range(ranks)]
    return Simulation(programs, [draw.randint(0, 30) for _ in range(ranks)])


def hang(draw: random.Random, sizes: tuple[int, int, int]) -> tuple[Simulation, dict[int, str]]:
    """Return a job that hangs, and its culprits with their kinds: one rank, or two of one stage at one place."""
    job = make_job(draw, sizes)
    stage = draw.randrange(sizes[0])
    across = sizes[1] * sizes[2]
    culprits = draw.sample(range(stage * across, (stage + 1) * across), draw.choice([1, 1, 2]))
    program = job.programs[culprits[0]]
    kind = draw.choice(["program", "gpu"])
    places = [
        place
        for place, one in enumerate(program)
        if not set(one.group) <= set(culprits) and (kind == "program" or one.name == "all_reduce")
    ]
    place = draw.choice([one for one in places if one > 12])
    at = dict.fromkeys(culprits, place)
    assert Simulation(job.programs, job.ahead).run({}, {}), "it hangs without a culprit"
    assert not job.run(at if kind == "program" else {}, at if kind == "gpu" else {})
    return job, dict.fromkeys(culprits, kind)


SIZES = [(2, 2, 2), (2, 1, 4), (4, 2, 2), (1, 4, 2), (2, 4, 4), (4, 2, 4)]
LARGE = [(4, 8, 4), (4, 16, 8), (8, 16, 8)]
Kinds = dict[int, str]
Recorders = Mapping[int, Sequence[RankRecords]]


def build(*rounds: Recorders) -> WaitGraph:
    """Return the graph of ranks that were read in one round, as a dump, or in several."""
    members = []
    for rank, last in rounds[-1].items():
        read = [round_[rank] for round_ in rounds]
        states = merge_rounds(read) if len(rounds) > 1 else read_single_round(last, counts_open=True)
        members.append(Member(id=RankId(rank=rank), recorder=RecorderFacts(libraries=states)))
    return wait_graph.build(members, lambda _member, _thread: "unclear")


def kinds(graph: WaitGraph) -> Kinds:
    found = dict.fromkeys(graph.programs, "program") | dict.fromkeys(graph.unrecorded, "unrecorded")
    return found | dict.fromkeys((end.rank for end in graph.gpus), "gpu")


def without(gone: int | None, recorders: Recorders) -> Recorders:
    return {rank: of_rank for rank, of_rank in recorders.items() if rank != gone}


def try_hangs(seed: int, count: int, sizes: Sequence[tuple[int, int, int]] = SIZES) -> tuple[int, int]:
    """Return the number of hangs with exactly the culprits as ends, and of those with another rank among them.

    In every third hang, the dump of a culprit is missing: its process may have died. It need not be an end if there is
    another culprit, because it may wait for that rank.
    """
    draw = random.Random(seed)
    exact = wrong = 0
    for number in range(count):
        job, culprits = hang(draw, draw.choice(sizes))
        gone = draw.choice(list(culprits)) if number % 3 == 0 else None
        ends = kinds(build(without(gone, job.recorders())))
        others = {rank: kind for rank, kind in culprits.items() if rank != gone}
        exact += ends in (culprits | dict.fromkeys({gone} - {None}, "unrecorded"), others or culprits)
        wrong += not ends.keys() <= culprits.keys()
    return exact, wrong


def test_culprits_of_generated_hangs_are_the_ends() -> None:
    exact, wrong = try_hangs(1, 60)
    assert (exact, wrong) == (60, 0)


def test_missing_dump_of_a_waiting_rank_is_seldom_an_end() -> None:
    """Such a rank is an end in a fifth of these hangs if nothing explains for which rank it may wait itself."""
    draw, wrong = random.Random(40), 0
    for _ in range(100):
        job, culprits = hang(draw, draw.choice(SIZES))
        gone = draw.choice([rank for rank in range(len(job.programs)) if rank not in culprits])
        wrong += not kinds(build(without(gone, job.recorders()))).keys() <= culprits.keys()
    assert wrong <= 3


def test_many_missing_dumps_beside_a_culprit_are_no_ends() -> None:
    """A rank may wait for one that waits for the culprit, without a group with the culprit."""
    draw = random.Random(41)
    for _ in range(10):
        job, culprits = hang(draw, (4, 4, 4))
        gone = draw.sample([rank for rank in range(len(job.programs)) if rank not in culprits], 12)
        recorders = {rank: of_rank for rank, of_rank in job.recorders().items() if rank not in gone}
        assert kinds(build(recorders)).keys() <= culprits.keys()


@pytest.mark.series
@pytest.mark.parametrize("seed", range(2, 12))
def test_culprits_of_many_generated_hangs_are_the_ends(seed: int) -> None:
    exact, wrong = try_hangs(seed, 300)
    assert exact >= 297 and wrong == 0


@pytest.mark.series
@pytest.mark.timeout(900)  # 160 s of CPU, on a machine that other tests may share
def test_culprits_among_a_thousand_ranks_are_the_ends() -> None:
    assert try_hangs(12, 6, LARGE) == (6, 0)


def try_healthy(seed: int, count: int) -> tuple[list[Answer], int]:
    """Return the answers to healthy jobs with slow ranks in two rounds; and how often a dump points at a rank.

    The dumps of the ranks are of different moments.
    """
    draw = random.Random(seed)
    answers, pointed = [], 0
    for _ in range(count):
        job = make_job(draw, draw.choice(SIZES))
        ranks = range(len(job.programs))
        slow = {rank: draw.randint(2, 6) for rank in draw.sample(ranks, 2)}
        job.run({}, {}, draw.randint(20, 120), slow)
        read = [job.recorders()]
        for rounds in (1, draw.randint(2, 30)):
            job.run({}, {}, rounds, slow)
            read.append(job.recorders())
        answers.append(decide(build(read[0], read[2])))
        graph = build({rank: read[draw.randrange(2)][rank] for rank in ranks})
        pointed += graph.is_settled and bool(kinds(graph))
    return answers, pointed


def test_healthy_slow_job_in_two_rounds_names_no_rank() -> None:
    answers, pointed = try_healthy(20, 40)
    assert [answer.named for answer in answers] == [()] * 40
    assert pointed <= 2


@pytest.mark.series
@pytest.mark.parametrize("seed", range(21, 31))
def test_thousand_healthy_slow_jobs_in_two_rounds_name_no_rank(seed: int) -> None:
    answers, _ = try_healthy(seed, 100)
    assert [answer.named for answer in answers] == [()] * 100


@pytest.mark.parametrize(("folder", "kind"), [("gpu-error", "gpu"), ("gil-held", "program")])
def test_recorded_culprits_of_real_hangs_are_found_without_any_one_dump(folder: str, kind: str) -> None:
    if not (REAL / folder).is_dir():
        pytest.skip("no dumps of real jobs beside this checkout")
    dumps = {}
    for path in (REAL / folder).iterdir():
        parsed = recorder_dump.parse(path.read_bytes())
        dumps[int(path.name.rpartition("_")[2])] = tuple(map(drop_unneeded, parsed.recorders))
    for gone in (None, *dumps):
        graph = build(without(gone, dumps))
        assert kinds(graph) == dict.fromkeys({9, 14} - {gone}, kind), gone
        assert graph.is_settled, gone
