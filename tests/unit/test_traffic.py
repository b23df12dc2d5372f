"""The traffic on the links of GPUs during a capture."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.model import GpuTraffic, GpuUse, PortCounters, PortTraffic, TrafficSweep
from hangwatch.stacks.link_traffic import gpu_use, link_rates, port_traffic

Pair = tuple[int, int] | None


def sweep(taken_seconds: float, uuid: str, **read: Any) -> TrafficSweep:
    """Return one reading of one GPU. `read` are other fields of `GpuTraffic`."""
    return TrafficSweep(gpus=(GpuTraffic(index=0, uuid=uuid, taken_monotonic_seconds=taken_seconds, **read),))


def sweeps(*nvlink: Pair, uuid: str = "GPU-0", pcie: tuple[Pair, ...] = (), seconds: float = 5.0) -> list[TrafficSweep]:
    """Return readings of the NVLink and PCIe counters of one GPU, `seconds` apart."""
    return [
        sweep(seconds * number, uuid, nvlink_bytes=counters, pcie_bytes=pcie[number] if pcie else None)
        for number, counters in enumerate(nvlink)
    ]


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ((), None),
        (((7, 9),), None),
        (((7, 9), (7, 9)), 0.0),
        (((7, 9), (107, 409), (207, 809)), 100.0),
        (((7, 9), None, (207, 809)), None),
        ((None, (7, 9), (107, 409)), 100.0),
        (((107, 9), (7, 1009)), None),  # the sum grew, but one of the two counters fell
        (((107, 9), (7, 9), (1007, 9)), 200.0),
    ],
    ids=["no reading", "one", "still", "flows", "a gap", "late", "fell", "fell, then grew"],
)
def test_what_flowed_between_readings(counters: tuple[Pair, ...], expected: float | None) -> None:
    assert link_rates(["GPU-0"], sweeps(*counters)) == (expected, None)
    assert link_rates(["GPU-0"], sweeps(*[None] * len(counters), pcie=counters)) == (None, expected)


def test_the_busiest_gpu_of_a_rank_counts_and_no_other_ranks() -> None:
    read = [
        TrafficSweep(gpus=tuple(gpu for sweep in at for gpu in sweep.gpus))
        for at in zip(
            sweeps((0, 0), (50, 0), uuid="a"),
            sweeps((0, 0), (0, 100), uuid="b"),
            sweeps((0, 0), (9000, 0), uuid="another's"),
            strict=True,
        )
    ]
    assert link_rates(["a", "b"], read)[0] == 20.0
    assert link_rates(["a"], read)[0] == 10.0
    assert link_rates([], read) == (None, None)
    assert link_rates(["not read"], read) == (None, None)


def sampled(*rates: tuple[float, float] | None, counted: Pair = None) -> list[TrafficSweep]:
    return [
        sweep(5.0 * number, "GPU-0", pcie_bytes=counted, pcie_bytes_per_second=rate)
        for number, rate in enumerate(rates)
    ]


def test_without_counters_of_pcie_its_samples_count() -> None:
    assert link_rates(["GPU-0"], sampled((1.0, 2.0), None, (3.0, 4.0)))[1] == 5.0
    assert link_rates(["GPU-0"], sampled(None, None))[1] is None
    assert link_rates(["GPU-0"], sampled((1.0, 2.0), (3.0, 4.0), counted=(7, 7)))[1] == 0.0


grown = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=4)


@given(grown, st.integers(0, 2**33), st.sampled_from([2**32, 2**36, 2**64]))
def test_counter_that_wraps_never_shows_more_than_flowed(flowed: list[tuple[int, int]], begin: int, width: int) -> None:
    true = [(begin, begin)]
    for sent, received in flowed:
        true.append((true[-1][0] + sent, true[-1][1] + received))
    shown = [(sent % width, received % width) for sent, received in true]

    rate = link_rates(["GPU-0"], sweeps(*shown))[0]

    most = max(sent + received for sent, received in flowed) / 5.0
    assert rate is None or 0.0 <= rate <= most * (1 + 1e-9)


@given(grown, st.integers(0, 2**33))
def test_a_counter_that_does_not_wrap_shows_what_flowed(flowed: list[tuple[int, int]], begin: int) -> None:
    shown = [(begin, begin)]
    for sent, received in flowed:
        shown.append((shown[-1][0] + sent, shown[-1][1] + received))
    total = sum(map(sum, flowed))
    assert link_rates(["GPU-0"], sweeps(*shown))[0] == pytest.approx(total / (5.0 * len(flowed)))


def used(uuid: str, *uses: GpuUse | None) -> list[GpuTraffic]:
    return [
        GpuTraffic(index=0, uuid=uuid, taken_monotonic_seconds=5.0 * number, use=use) for number, use in enumerate(uses)
    ]


def test_what_gpus_did_is_that_of_the_look_and_of_the_one_with_most_to_do() -> None:
    before, spins, works = (
        GpuUse(sm_ratio=sm, tensor_ratio=tensor, dram_ratio=dram)
        for sm, tensor, dram in ((1.0, 0.9, 0.8), (0.1, 0.0, 0.01), (0.5, 0.3, 0.2))
    )
    of_three = zip(used("a", before, spins, spins), used("b", None, None, works), used("c", *[before] * 3), strict=True)
    read = [TrafficSweep(gpus=at) for at in of_three]
    assert gpu_use(["a"], read) == spins  # traffic before the first reading does not count
    assert gpu_use(["a", "b"], read) == works
    assert gpu_use(["d"], read) is None
    assert gpu_use(["a"], read[:1]) is None


def test_ports_are_compared_by_name_and_what_was_reset_tells_nothing() -> None:
    first = [
        PortCounters(name="mlx5_0/1", carried_bytes=1000, errors=(("link_downed", 4), ("symbol_error", 7))),
        PortCounters(name="mlx5_1/1", carried_bytes=9000, errors=(("link_downed", 9),)),
        PortCounters(name="mlx5_2/1", carried_bytes=0),
    ]
    last = [
        PortCounters(name="mlx5_1/1", carried_bytes=10, errors=(("link_downed", 0), ("new", 5))),
        PortCounters(name="mlx5_0/1", carried_bytes=6000, errors=(("link_downed", 5), ("symbol_error", 7))),
        PortCounters(name="mlx5_3/1", carried_bytes=500),
    ]
    assert port_traffic(first, last, 5.0) == PortTraffic(bytes_per_second=1000.0, worse=("mlx5_0/1 link_downed +1",))
    assert port_traffic(first[2:], last, 5.0) is None
    assert port_traffic([], [], 5.0) is None


COUNTS = st.lists(st.builds(PortCounters, name=st.sampled_from("abc"), carried_bytes=st.integers(0, 2**64)), max_size=4)


@given(COUNTS, COUNTS, st.floats(0, 1e9))
def test_no_rate_of_a_port_is_negative(first: list[PortCounters], last: list[PortCounters], seconds: float) -> None:
    found = port_traffic(first, last, seconds)
    assert found is None or found.bytes_per_second >= 0
