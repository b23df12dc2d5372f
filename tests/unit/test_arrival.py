"""The rank that enqueues its collectives late, out of simulated records: named, or not, and with which numbers."""

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.collectives.arrival import ArrivalOrder, Enqueued, Window, add_reading, judge
from hangwatch.model import ProcessId

SIZES = ((1000,),)
START_NS = 1_700_000_000 * 10**9
Times = list[list[float]]
"""The time in seconds at which each rank enqueued each collective."""


def processes(count: int) -> list[ProcessId]:
    return [ProcessId(pid=100 + rank, start_ticks=1) for rank in range(count)]


def enqueued(seconds: float, number: int, group: str = "0", operation: str = "all_reduce") -> Enqueued:
    return Enqueued("gloo", group, operation, SIZES, number, START_NS + round(seconds * 1e9))


def order_of(times: Times, seconds: float = 1.0, held: int = 500, group: str = "0") -> ArrivalOrder:
    """Feed collectives in readings of a recorder that holds `held` records, and judge them."""
    window, ranks = Window(), processes(len(times[0]))
    for end in range(held // 2, len(times) + held // 2, held // 2):
        rows = list(enumerate(times[:end], 1))[-held:]
        window = add_reading(
            window,
            {each: [enqueued(row[rank], n, group) for n, row in rows] for rank, each in enumerate(ranks)},
            seconds,
        )
    return judge(window, seconds)


class Jobs(NamedTuple):
    """A synchronous job: all ranks leave a collective together, as with gloo. Times are ratios of the step."""

    ranks: int
    steps: int
    jitter: float = 0.10
    per_step: int = 1

    def play(self, slow: Callable[[int, int], float], rng: random.Random) -> Times:
        """Return the times. `slow` is the additional time of a rank in a step."""
        now, times = 0.0, []
        for step in range(self.steps):
            for part in range(self.per_step):
                work = 1.0 if part == 0 else 0.05
                row = [now + 0.02 * work * (1 + rng.gauss(0, self.jitter)) for _ in range(self.ranks)]
                if part == 0:
                    row = [time + 0.02 * slow(rank, step) for rank, time in enumerate(row)]
                times.append(row)
                now = max(row) + 0.0005
        return times


def slow_no_rank(_rank: int, _step: int) -> float:
    return 0.0


def play_nccl(slow: str, rng: random.Random, steps: int, item_every: int, ranks: int = 8) -> Times:
    """Play a job with asynchronous collectives: the CPU runs up to 8 steps ahead, except for each `item_every`th."""
    cpu, free, ends, times = [0.0] * ranks, [0.0] * ranks, [0.0], []
    for step in range(steps):
        row, ready = [], []
        for rank in range(ranks):
            launch, compute = 0.010 * (1 + rng.gauss(0, 0.03)), 0.100 * (1 + rng.gauss(0, 0.03))
            if rank == 3:
                launch, compute = launch + 0.010 * (slow == "cpu"), compute * (1 + 0.10 * (slow == "gpu"))
            cpu[rank] = max(cpu[rank], ends[max(0, step - 8)]) + launch
            row.append(cpu[rank])
            ready.append(max(cpu[rank], free[rank]) + compute)
        end = max(ready) + 0.005
        free = [end] * ranks
        if step % item_every == 0:
            cpu = [end + rng.random() * 2e-4 for _ in range(ranks)]
        ends.append(end)
        times.append(row)
    return times


def test_late_rank_is_named_with_its_lateness_and_step() -> None:
    order = order_of(Jobs(8, 500).play(lambda rank, _: 0.10 * (rank == 5), random.Random(1)), seconds=5.0)
    assert order.named == processes(8)[5] and order.reason == ""
    assert 0.07 < order.lateness_ratio < 0.13 and 0.02 < order.step_seconds < 0.03
    assert order.lateness_seconds[processes(8)[5]] == pytest.approx(order.lateness_ratio * order.step_seconds)
    assert order.last_ratio > 0.3 and order.standard_errors > 6 and order.records >= 300


def test_balanced_and_rotating_jobs_name_slow_no_rank() -> None:
    for seed in range(6):
        rng, ranks = random.Random(seed), (2, 3, 4, 8)[seed % 4]
        balanced = order_of(Jobs(ranks, 330).play(slow_no_rank, rng))
        assert (balanced.named, balanced.reason) == (None, "NoneLate")
        turns = [rng.randrange(ranks) for _ in range(330)]
        rotating = order_of(Jobs(ranks, 330).play(lambda rank, step, turns=turns: 0.2 * (rank == turns[step]), rng))
        assert rotating.named is None, ranks


def test_rank_that_is_late_in_only_one_half_is_not_named() -> None:
    rng = random.Random(2)
    times = Jobs(4, 400).play(lambda rank, step: 0.3 * (rank == 1 and step < 210), rng)
    assert order_of(times, seconds=5.0).named is None


def test_two_ranks_that_are_late_alike_are_not_named() -> None:
    order = order_of(Jobs(8, 400).play(lambda rank, _: 0.3 * (rank in (2, 3)), random.Random(3)))
    assert (order.named, order.reason) == (None, "NoneLate") and order.lateness_ratio > 0.2


def test_rank_that_is_late_for_little_of_the_step_is_not_named() -> None:
    order = order_of(Jobs(8, 400, jitter=0.005).play(lambda rank, _: 0.025 * (rank == 2), random.Random(14)))
    assert (order.named, order.latest) == (None, processes(8)[2]) and order.standard_errors > 6


def test_late_rank_is_named_at_the_first_collective_of_a_step() -> None:
    times = Jobs(8, 400, per_step=4).play(lambda rank, _: 0.10 * (rank == 6), random.Random(4))
    order = order_of(times, held=1000)
    assert order.named == processes(8)[6] and order.place is not None and order.place.position == 0
    assert 0.02 < order.step_seconds < 0.035


@pytest.mark.parametrize("item_every", [1, 10, 10**6])
def test_nccl_job_names_a_slow_cpu_and_no_slow_gpu(item_every: int) -> None:
    steps = 3300 if item_every == 10 else 700
    slow_gpu = order_of(play_nccl("gpu", random.Random(5), steps, item_every), held=1000)
    assert (slow_gpu.named, slow_gpu.reason) == (None, "NoneLate")
    slow_cpu = order_of(play_nccl("cpu", random.Random(5), steps, item_every), held=1000)
    assert slow_cpu.named == processes(8)[3]


def test_few_records_are_counted_and_the_rest_is_forecast() -> None:
    times = Jobs(4, 200).play(lambda rank, _: 0.3 * (rank == 1), random.Random(6))
    order = order_of(times, held=100)
    assert (order.named, order.reason, order.records) == (None, "TooFewRecords", 199)
    per_second = 199 / (times[-1][0] - times[0][0])
    assert order.ready_in_seconds == pytest.approx(101 / per_second, rel=0.1)
    assert order_of(times[:2]).reason == "TooFewRecords" and order_of(times[:2]).ready_in_seconds is None
    assert order_of(times[:1]).reason == "NoRecords"


def test_records_of_a_shorter_time_are_not_enough() -> None:
    times = Jobs(4, 400).play(lambda rank, _: 0.3 * (rank == 1), random.Random(7))
    order = order_of(times, seconds=60.0)
    assert order.reason == "TooFewRecords" and order.ready_in_seconds == pytest.approx(51, abs=2)


def test_each_record_is_used_once_and_old_readings_are_dropped() -> None:
    times = Jobs(4, 3000).play(slow_no_rank, random.Random(8))
    order = order_of(times, seconds=10.0, held=400)
    assert 10 / 0.0235 < order.records < 10 / 0.0235 + 450


def by_role(late_groups: Sequence[str], groups: Sequence[str] = ("0", "1")) -> ArrivalOrder:
    """Judge a job of 4 ranks in which rank 2 is late in some of its groups; group "2-3" has only ranks 2 and 3."""
    rng, ranks, window = random.Random(9), processes(4), Window()
    records: dict[ProcessId, list[Enqueued]] = {rank: [] for rank in ranks}
    for number in range(1, 400):
        for group in groups:
            for rank in ranks[2:] if group == "2-3" else ranks:
                late = 0.004 * (rank == ranks[2] and group in late_groups)
                records[rank].append(enqueued(0.02 * number + rng.gauss(0, 0.001) + late, number, group))
    return judge(add_reading(window, records, 5.0), 5.0)


def test_rank_that_is_late_in_one_of_its_groups_is_late_by_role() -> None:
    assert by_role(["0", "1"]).named == processes(4)[2]
    assert by_role(["1"]).reason == "LateByRole"
    assert by_role(["0", "1", "2-3"], ["0", "1", "2-3"]).named == processes(4)[2]


def test_rank_that_is_late_where_few_ranks_are_is_late_by_role() -> None:
    rng, ranks = random.Random(10), processes(8)
    records = {
        rank: [enqueued(0.02 * n + rng.gauss(0, 0.001) + 0.005 * (place == 7), n, group) for n in range(1, 400)]
        for place, rank in enumerate(ranks)
        for group in ["ends" if place in (0, 7) else "middle"]
    }
    order = judge(add_reading(Window(), records, 5.0), 5.0)
    assert (order.named, order.latest, order.reason) == (None, ranks[7], "LateByRole")


def test_group_that_is_made_anew_counts_from_its_first_collective() -> None:
    first, second = (
        Jobs(4, 320).play(slow_no_rank, random.Random(11)),
        Jobs(4, 200).play(slow_no_rank, random.Random(12)),
    )
    ranks, window = processes(4), Window()
    for times, start in ((first, 0.0), (second, 100.0)):
        records = {
            each: [enqueued(start + row[rank], n) for n, row in enumerate(times, 1)] for rank, each in enumerate(ranks)
        }
        window = add_reading(window, records, 1000.0)
    assert judge(window, 50.0).records == 319 + 199


def test_only_collectives_that_every_rank_holds_are_compared() -> None:
    times = Jobs(4, 400).play(slow_no_rank, random.Random(13))
    ranks = processes(4)
    records = {
        each: [enqueued(row[rank], n) for n, row in enumerate(times, 1) if n > 20 * rank and (n < 390 or rank != 1)]
        for rank, each in enumerate(ranks)
    }
    window = add_reading(Window(), records, 1.0)
    assert judge(window, 1.0).records == 389 - 61
    everything = {each: [enqueued(row[rank], n) for n, row in enumerate(times, 1)] for rank, each in enumerate(ranks)}
    assert judge(add_reading(window, everything, 100.0), 1.0).records == 400 - 61


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_lateness_is_measured_from_the_median_of_the_others(ticks: list[int]) -> None:
    times = [[(row + 1) * 0.02 + tick * 0.001 for tick in ticks] for row in range(310)]
    order = order_of(times, held=620)
    expected = [tick - median(ticks[:rank] + ticks[rank + 1 :]) for rank, tick in enumerate(ticks)]
    assert [order.lateness_seconds[each] * 1000 for each in processes(len(ticks))] == pytest.approx(expected, abs=1e-3)


@pytest.mark.series
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["balanced", "rotating", "straggler"])
def test_thousand_jobs_of_a_kind(kind: str) -> None:
    sizes = [(4, 500), (8, 300), (16, 120), (64, 60), (256, 15), (1024, 5)]
    wrong, right, jobs = 0, 0, 0
    for ranks, count in sizes:
        for seed in range(count):
            rng = random.Random(f"{kind} {ranks} {seed}")
            steps = 1501 if kind == "straggler" else 310
            late, extra = rng.randrange(ranks), rng.uniform(0.05, 0.2)
            turns = [rng.randrange(ranks) for _ in range(steps)]
            slow = {
                "balanced": slow_no_rank,
                "rotating": lambda rank, step, turns=turns, extra=extra: extra * (rank == turns[step]),
                "straggler": lambda rank, _, late=late, extra=extra: extra * (rank == late),
            }[kind]
            order = order_of(Jobs(ranks, steps).play(slow, rng), held=800, seconds=1.0 if steps < 400 else 30.0)
            is_right = kind == "straggler" and order.named == processes(ranks)[late]
            right, wrong, jobs = right + is_right, wrong + (order.named is not None and not is_right), jobs + 1
    print(f"{kind}: {jobs} jobs, {right} right, {wrong} wrong")
    assert wrong == 0
    assert kind != "straggler" or right >= 0.98 * jobs
