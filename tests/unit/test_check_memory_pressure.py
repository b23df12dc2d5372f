"""memory_pressure: available memory, and the ratio of time in which tasks wait for memory."""

import pytest

from hangwatch.probes.node.machine import Node
from tests.node_tree import NodeTree, expect, run, values

MEMINFO = "MemTotal:       1000000 kB\nMemFree:          10 kB\nMemAvailable:   {available} kB\nSwapTotal: 0 kB\n"
PSI = "some avg10=1.00 avg60={some} avg300=0.10 total=2500000\nfull avg10=0.00 avg60={full} avg300=0.00 total=1500000\n"


def fill(tree: NodeTree, available: int = 900000, some: str = "0.50", full: str = "0.00", psi: bool = True) -> None:
    tree.write("proc/meminfo", MEMINFO.format(available=available))
    if psi:
        tree.write("proc/pressure/memory", PSI.format(some=some, full=full))


def test_available_memory_without_pressure_is_ok(tree: NodeTree) -> None:
    fill(tree)
    result = expect(("OK", "MemoryLeft"), "memory_pressure", tree.node())
    assert values(result, "memory_available_bytes") == {(): 900000 * 1024}
    assert result.verdict.message == "0.9 GiB of 1.0 GiB available, all tasks waited for memory for 0% of the last 60 s"
    assert values(result, "memory_stalled_seconds_total") == {("some",): 2.5, ("full",): 1.5}
    assert values(result, "memory_pressure_ratio") == {("some",): 0.005, ("full",): 0.0}


@pytest.mark.parametrize(
    ("available", "full", "expected"),
    [
        (49000, "0.00", ("WARNING", "MemoryLow")),
        (19000, "0.00", ("CRITICAL", "MemoryExhausted")),
        (900000, "10.01", ("WARNING", "MemoryStalls")),
        (900000, "40.01", ("CRITICAL", "MemoryStalls")),
        (50000, "10.00", ("OK", "MemoryLeft")),
    ],
)
def test_memory_that_gets_short(tree: NodeTree, available: int, full: str, expected: tuple[str, str]) -> None:
    fill(tree, available, full=full)
    expect(expected, "memory_pressure", tree.node())


def test_one_task_that_waits_is_no_finding(tree: NodeTree) -> None:
    fill(tree, some="95.00")
    expect(("OK", "MemoryLeft"), "memory_pressure", tree.node())


def test_a_kernel_without_psi(tree: NodeTree) -> None:
    fill(tree, psi=False)
    result = expect(("OK", "MemoryLeft"), "memory_pressure", tree.node())
    assert "no PSI" in result.verdict.message
    assert not values(result, "memory_pressure_ratio")


@pytest.mark.parametrize("text", ["", "MemTotal: kB\n", "MemTotal: lots kB\nMemAvailable: 1 kB\n"])
def test_a_meminfo_that_cannot_be_understood(tree: NodeTree, text: str) -> None:
    tree.write("proc/meminfo", text)
    expect(("UNKNOWN", "UnreadableMeminfo"), "memory_pressure", tree.node())


def test_a_file_that_should_be_readable_and_is_not(tree: NodeTree) -> None:
    fill(tree, psi=False)
    tree.make_unreadable("proc/pressure/memory")
    expect(("UNKNOWN", "CannotRead"), "memory_pressure", tree.node())


def test_this_machine() -> None:
    result = run("memory_pressure", Node())
    assert values(result, "memory_total_bytes")[()] > values(result, "memory_available_bytes")[()] > 0
