"""What the links of GPUs carried during a look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.hang.traffic import LinkRates, link_rates
from hangwatch.model import GpuTraffic, TrafficSweep

Pair = tuple[int, int] | None


def sweeps(*nvlink: Pair, uuid: str = "GPU-0", pcie: tuple[Pair, ...] = (), seconds: float = 5.0) -> list[TrafficSweep]:
    """Readings 5 s apart of the NVLink counters of one GPU, and of its PCIe."""
    return [
        TrafficSweep(
            gpus=(
                GpuTraffic(
                    index=0,
                    uuid=uuid,
                    taken_monotonic_seconds=seconds * number,
                    nvlink_bytes=counters,
                    pcie_bytes=pcie[number] if pcie else None,
                ),
            )
        )
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
        (((107, 9), (7, 1009)), None),  # the sum grew, and yet one of the two fell
        (((107, 9), (7, 9), (1007, 9)), 200.0),
    ],
    ids=["no reading", "one", "still", "flows", "a gap", "late", "fell", "fell, then grew"],
)
def test_what_flowed_between_readings(counters: tuple[Pair, ...], expected: float | None) -> None:
    assert link_rates(["GPU-0"], sweeps(*counters)) == LinkRates(nvlink=expected, pcie=None)
    assert link_rates(["GPU-0"], sweeps(*[None] * len(counters), pcie=counters)) == LinkRates(pcie=expected)


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
    assert link_rates(["a", "b"], read).nvlink == 20.0
    assert link_rates(["a"], read).nvlink == 10.0
    assert link_rates([], read) == LinkRates()
    assert link_rates(["not read"], read) == LinkRates()


def sampled(*rates: tuple[float, float] | None, counted: Pair = None) -> list[TrafficSweep]:
    return [
        TrafficSweep(
            gpus=(
                GpuTraffic(
                    index=0,
                    uuid="GPU-0",
                    taken_monotonic_seconds=5.0 * number,
                    pcie_bytes=counted,
                    pcie_bytes_per_second=rate,
                ),
            )
        )
        for number, rate in enumerate(rates)
    ]


def test_without_counters_of_pcie_its_samples_count() -> None:
    assert link_rates(["GPU-0"], sampled((1.0, 2.0), None, (3.0, 4.0))).pcie == 5.0
    assert link_rates(["GPU-0"], sampled(None, None)).pcie is None
    assert link_rates(["GPU-0"], sampled((1.0, 2.0), (3.0, 4.0), counted=(7, 7))).pcie == 0.0


grown = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=4)


@given(grown, st.integers(0, 2**33), st.sampled_from([2**32, 2**36, 2**64]))
def test_a_counter_that_wraps_never_shows_more_than_flowed(
    flowed: list[tuple[int, int]], begin: int, width: int
) -> None:
    true = [(begin, begin)]
    for sent, received in flowed:
        true.append((true[-1][0] + sent, true[-1][1] + received))
    shown = [(sent % width, received % width) for sent, received in true]

    rate = link_rates(["GPU-0"], sweeps(*shown)).nvlink

    most = max(sent + received for sent, received in flowed) / 5.0
    assert rate is None or 0.0 <= rate <= most * (1 + 1e-9)


@given(grown, st.integers(0, 2**33))
def test_a_counter_that_does_not_wrap_shows_what_flowed(flowed: list[tuple[int, int]], begin: int) -> None:
    shown = [(begin, begin)]
    for sent, received in flowed:
        shown.append((shown[-1][0] + sent, shown[-1][1] + received))
    total = sum(map(sum, flowed))
    assert link_rates(["GPU-0"], sweeps(*shown)).nvlink == pytest.approx(total / (5.0 * len(flowed)))
