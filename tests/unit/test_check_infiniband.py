"""infiniband: the ports in sysfs, on fixture trees."""

import os
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.probes.network import infiniband
from tests.conftest import wait_for
from tests.node_tree import Checked, NodeTree, expect, run, status_and_reason, values


def port(
    tree: NodeTree,
    device: str = "mlx5_0",
    *,
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    number: int = 1,
    link_layer: str = "InfiniBand",
    **counters: int | str,
) -> None:
    home = f"sys/class/infiniband/{device}/ports/{number}"
    tree.write(f"{home}/state", state + "\n")
    tree.write(f"{home}/phys_state", physical + "\n")
    tree.write(f"{home}/rate", rate + "\n")
    tree.write(f"{home}/link_layer", link_layer + "\n")
    for name, count in {"link_downed": 0, "symbol_error": 0, **counters}.items():
        folder = "hw_counters" if name in infiniband.HARDWARE_COUNTERS else "counters"
        tree.write(f"{home}/{folder}/{name}", f"{count}\n")


def test_ports_that_are_well(tree: NodeTree) -> None:
    for number in range(8):
        port(tree, f"mlx5_{number}", link_downed=3, local_ack_timeout_err=17)
    result = expect(("OK", "PortsActive"), "infiniband", tree.node())
    assert "8 of 8 ports active at 400 Gb/sec" in result.verdict.message
    assert values(result, "infiniband_port_rate_bytes_per_second")["mlx5_0", "1"] == 5e10
    assert values(result, "infiniband_port_events_total")["mlx5_7", "1", "local_ack_timeout_err"] == 17


def test_adapter_that_vanishes_stays_a_finding(tree: NodeTree) -> None:
    port(tree)
    checked = Checked("infiniband")
    checked.expect(("OK", "PortsActive"), tree.node())
    shutil.rmtree(tree.sys / "class")
    results = [checked.run(tree.node()) for _ in range(15)]
    assert {status_and_reason(result) for result in results} == {("CRITICAL", "Vanished")}
    assert "mlx5_0/1" in results[-1].verdict.message
    port(tree)
    checked.expect(("OK", "PortsActive"), tree.node())


def test_a_node_without_adapters(tree: NodeTree) -> None:
    expect(("OK", "NotPresent"), "infiniband", tree.node())
    (tree.sys / "class" / "infiniband").mkdir(parents=True)
    expect(("OK", "NotPresent"), "infiniband", tree.node())


def test_a_port_that_is_not_used_is_told_and_no_finding(tree: NodeTree) -> None:
    port(tree)
    port(tree, "mlx5_1", state="1: DOWN", physical="3: Disabled")
    result = expect(("OK", "PortsActive"), "infiniband", tree.node())
    assert "mlx5_1/1 not active" in result.verdict.message
    expect(("CRITICAL", "PortsMissing"), "infiniband", tree.node(), expected_active_ports=2)


def test_no_port_active(tree: NodeTree) -> None:
    port(tree, state="1: DOWN", physical="2: Polling")
    expect(("WARNING", "NoPortActive"), "infiniband", tree.node())


def test_on_ethernet_one_lane_and_no_cable_are_common(tree: NodeTree) -> None:
    port(tree, rate="25 Gb/sec (1X EDR)", link_layer="Ethernet")
    expect(("OK", "PortsActive"), "infiniband", tree.node())
    port(tree, state="1: DOWN", physical="3: Disabled", link_layer="Ethernet")
    result = expect(("OK", "PortsActive"), "infiniband", tree.node())
    assert "0 of 1 ports active; mlx5_0/1 not active" in result.verdict.message
    expect(("CRITICAL", "PortsMissing"), "infiniband", tree.node(), expected_active_ports=1)


def test_a_link_without_a_subnet_manager(tree: NodeTree) -> None:
    port(tree)
    port(tree, "mlx5_1", state="2: INIT")
    result = expect(("WARNING", "PortNotActivated"), "infiniband", tree.node())
    assert "subnet manager" in result.verdict.remedy


def test_a_port_that_goes_down_stays_a_finding_beyond_the_window(tree: NodeTree) -> None:
    check, node = Checked("infiniband"), tree.node()
    port(tree)
    check.expect(("OK", "PortsActive"), node)
    port(tree, state="1: DOWN", physical="2: Polling")
    result = check.expect(("CRITICAL", "PortWentDown"), node)
    assert "mlx5_0/1 is DOWN (Polling); it was ACTIVE before" in result.verdict.message
    for _ in range(9):
        check.expect(("CRITICAL", "PortWentDown"), node)
    result = check.expect(("CRITICAL", "Vanished"), node)
    assert "none of 1 ports is active" in result.verdict.message


def test_an_adapter_that_vanishes(tree: NodeTree) -> None:
    check, node = Checked("infiniband"), tree.node()
    port(tree)
    port(tree, "mlx5_1")
    check.run(node)
    (tree.sys / "class/infiniband/mlx5_1").rename(tree.sys / "gone")
    check.expect(("CRITICAL", "PortGone"), node)


def test_a_rate_that_falls(tree: NodeTree) -> None:
    check, node = Checked("infiniband"), tree.node()
    port(tree)
    check.run(node)
    port(tree, rate="100 Gb/sec (1X NDR)")
    result = check.expect(("WARNING", "RateFell"), node)
    assert "it ran at 400 Gb/sec before" in result.verdict.message


@pytest.mark.parametrize(
    ("rate", "expected", "reason"),
    [
        ("100 Gb/sec (1X NDR)", 0.0, "LanesLost"),
        ("200 Gb/sec (4X HDR)", 400.0, "RateLow"),
        ("200 Gb/sec (4X HDR)", 200.0, "PortsActive"),
        ("something new", 400.0, "PortsActive"),
    ],
)
def test_a_rate_under_what_it_should_be(tree: NodeTree, rate: str, expected: float, reason: str) -> None:
    port(tree, rate=rate)
    assert status_and_reason(run("infiniband", tree.node(), expected_gigabits_per_second=expected))[1] == reason


@pytest.mark.parametrize(
    ("counter", "grown", "expected"),
    [
        ("link_downed", 1, ("WARNING", "LinkFlapped")),
        ("link_error_recovery", 1, ("WARNING", "LinkFlapped")),
        ("symbol_error", 100, ("OK", "PortsActive")),
        ("symbol_error", 101, ("WARNING", "PortErrors")),
        ("local_ack_timeout_err", 101, ("WARNING", "PortErrors")),
    ],
)
def test_counters_are_judged_by_growth(tree: NodeTree, counter: str, grown: int, expected: tuple[str, str]) -> None:
    check, node = Checked("infiniband"), tree.node()
    port(tree, **{counter: 7000})
    assert status_and_reason(check.run(node)) == ("OK", "PortsActive"), "a high value by itself is history"
    tree.time.pass_seconds(60)
    port(tree, **{counter: 7000 + grown})
    result = check.expect(expected, node)
    if expected[0] != "OK":
        assert f"{counter} grew by {grown} within 60 s" in result.verdict.message


def test_a_counter_that_wraps_or_is_reset(tree: NodeTree) -> None:
    check, node = Checked("infiniband", errors=10), tree.node()
    for count in (255, 3, 9):
        port(tree, symbol_error=count)
        result = check.run(node)
    assert status_and_reason(result) == ("OK", "PortsActive"), "from 255 to 3 is 3 more, not -252"
    port(tree, symbol_error=20)
    check.expect(("WARNING", "PortErrors"), node)


def test_counters_that_an_adapter_does_not_have(tree: NodeTree) -> None:
    port(tree, port_rcv_errors="N/A (no PMA)")
    result = expect(("OK", "PortsActive"), "infiniband", tree.node())
    counted = values(result, "infiniband_port_events_total")
    assert set(counted) == {("mlx5_0", "1", "link_downed"), ("mlx5_0", "1", "symbol_error")}


def test_a_port_that_should_answer_and_does_not(tree: NodeTree) -> None:
    port(tree)
    port(tree, "mlx5_1")
    tree.make_unreadable("sys/class/infiniband/mlx5_1/ports/1/state")
    result = expect(("UNKNOWN", "CannotRead"), "infiniband", tree.node())
    assert result.faults[0].subject == "mlx5_1/1"
    assert ("mlx5_0", "1") in values(result, "infiniband_port_active")


@given(st.text(max_size=60))
def test_any_rate_is_understood_or_unknown(text: str) -> None:
    rate, lanes = infiniband.parse_rate(text)
    assert rate is None or rate >= 0
    assert lanes is None or rate is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400 Gb/sec (4X NDR)", (5e10, 4)),
        ("2.5 Gb/sec (1X SDR)", (3.125e8, 1)),
        ("100 Gb/sec", (1.25e10, None)),
        ("", (None, None)),
    ],
)
def test_rates_as_the_kernel_prints_them(text: str, expected: tuple[float | None, int | None]) -> None:
    assert infiniband.parse_rate(text) == expected


def test_ports_that_do_not_answer_cost_a_look_its_deadline_once(tree: NodeTree) -> None:
    # Reading a counter blocks on a FIFO, as it does when an adapter's firmware hangs. Only the first read waits.
    port(tree, port_xmit_data=3, port_rcv_data=4, link_downed=5)
    port(tree, "mlx5_1", port_xmit_data=9)
    ports = infiniband.Traffic(deadline_seconds=20.0)
    (only,) = ports.read(tree.sys)
    assert (only.name, only.carried_bytes, dict(only.errors)["link_downed"]) == ("mlx5_0/1", 28, 5)
    silent = tree.sys / "class/infiniband/mlx5_1/ports/1/counters/port_xmit_data"
    silent.unlink()
    os.mkfifo(silent)
    hasty = infiniband.Traffic(deadline_seconds=0.1)
    before = set(threading.enumerate())
    assert [hasty.read(tree.sys) for _ in range(3)] == [(), (), ()]
    assert len(set(threading.enumerate()) - before) == 1
    end_of_file = os.open(silent, os.O_RDWR | os.O_NONBLOCK)
    silent.unlink()
    os.close(end_of_file)  # the blocked thread ends
    wait_for(lambda: len(hasty.read(tree.sys)) == 1, "an answer again")
