"""clock_skew: the kernel's clock state, a real chronyd on loopback, and jumps of the clock."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hangwatch.checks import clock_skew
from hangwatch.checks.clock_skew import Sample, Settings, judge
from hangwatch.model import Fault
from hangwatch.probes.node import chrony, timex
from hangwatch.probes.node.machine import Node
from tests.commands import spawn, write_program
from tests.conftest import wait_for
from tests.node_tree import Checked, FakeClock
from tests.servers import free_port

KEPT = timex.Timex(synchronized=True, offset_seconds=1e-5, estimated_error_seconds=1e-4, maximum_error_seconds=0.02)
UNKEPT = timex.Timex(synchronized=False, offset_seconds=0.0, estimated_error_seconds=16.0, maximum_error_seconds=16.0)
TRACKING = "C0000201,time.example,3,1700000000.1,-0.000012,0.000003,0.00002,-3.1,0.001,0.02,0.0015,0.0009,64.2,Normal\n"


def sample(unix: float = 1.7e9, monotonic: float = 100.0, **others: Any) -> Sample:
    return Sample(unix_seconds=unix, monotonic_seconds=monotonic, **{"kernel": KEPT, **others})


def tracking(ahead_seconds: float) -> chrony.Tracking:
    return chrony.Tracking(source="node2", stratum=2, offset_seconds=-ahead_seconds, synchronized=True)


def verdict(*window: Sample, **settings: Any) -> tuple[str, str]:
    found = judge(window, Settings(**settings))
    return found.status.name, found.reason


def test_a_clock_that_is_kept() -> None:
    found = judge((sample(chrony=tracking(0.002)),), Settings())
    assert (found.status.name, found.reason) == ("OK", "ClockInStep")
    assert "2.000 ms (sources: kernel, chrony)" in found.message


def test_clock_without_synchronization_is_a_warning() -> None:
    assert verdict(sample(kernel=UNKEPT)) == ("WARNING", "ClockUnsynchronized")
    assert verdict(sample(kernel=UNKEPT), require_synchronized=False) == ("OK", "ClockInStep")


LOCAL_CLOCK = "7F7F0101,,10,1795849046.2,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,Normal\n"


@pytest.mark.parametrize("kernel", [KEPT, UNKEPT])
@pytest.mark.parametrize("text", [TRACKING.replace("Normal", "Not synchronised"), LOCAL_CLOCK])
def test_chrony_without_a_source(kernel: timex.Timex, text: str) -> None:
    found = judge((sample(kernel=kernel, chrony=chrony.parse_tracking(text)),), Settings())
    assert (found.status.name, found.reason) == ("WARNING", "ClockUnsynchronized")
    assert "chronyd is running but has no source" in found.message


def test_chrony_that_follows_a_source_outweighs_the_kernel() -> None:
    follows = sample(kernel=UNKEPT, chrony=chrony.parse_tracking(TRACKING))
    found = judge((follows,), Settings())
    assert (found.status.name, found.reason) == ("OK", "ClockInStep")
    assert "0.012 ms" in found.message and "rtcsync" in found.message
    points = [point for metrics in clock_skew.METRICS for point in metrics.points(follows)]
    assert {point.name: point.value for point in points}["clock_synchronized"] == 1


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(0.049, "OK"), (-0.049, "OK"), (0.051, "WARNING"), (-0.051, "WARNING"), (1.1, "CRITICAL"), (-400.0, "CRITICAL")],
)
def test_the_offset_to_the_source(offset: float, expected: str) -> None:
    assert verdict(sample(chrony=tracking(offset)))[0] == expected
    assert verdict(sample(chrony=tracking(offset)), warning_seconds=500.0, critical_seconds=500.0)[0] == "OK"


def test_the_message_says_which_clock_is_ahead() -> None:
    assert "behind chrony" in judge((sample(chrony=tracking(0.3)),), Settings()).message
    assert "ahead of chrony" in judge((sample(chrony=tracking(-0.3)),), Settings()).message


def test_a_jump_is_seen_by_the_monotonic_clock_and_remembered_for_the_window() -> None:
    steady, after = sample(1000.0, 100.0), sample(1060.0 - 3600.0, 160.0)
    assert verdict(steady, after) == ("WARNING", "ClockStepped")
    assert "-3600.000 s about 0 s ago" in judge((steady, after), Settings()).message
    later = sample(1120.0 - 3600.0, 220.0)
    assert "-3600.000 s about 60 s ago" in judge((steady, after, later), Settings()).message
    assert verdict(steady, after, later) == ("WARNING", "ClockStepped")
    assert verdict(after, later) == ("OK", "ClockInStep")


def test_the_whole_check_sees_a_clock_step_between_two_runs() -> None:
    clock, check = FakeClock(), Checked("clock_skew")
    node = Node(clock=clock.clock())
    before = check.run(node)
    assert "ClockStepped" not in before.verdict.reason
    clock.pass_seconds(60)
    clock.now_unix += 3600
    assert "jumped by +3600.000 s" in check.run(node).verdict.message


def test_this_kernel_answers() -> None:
    answer = timex.read()
    assert isinstance(answer, timex.Timex)
    assert answer.maximum_error_seconds >= 0


@pytest.mark.parametrize(
    ("state", "status", "offset", "synchronized", "offset_seconds"),
    [
        (0, timex.STA_NANO, -1_500_000, True, -0.0015),
        (0, 0, 1500, True, 0.0015),
        (timex.TIME_ERROR, timex.STA_UNSYNC, 0, False, 0.0),
        (0, timex.STA_UNSYNC | timex.STA_NANO, 0, False, 0.0),
        (timex.TIME_ERROR, 0, 0, False, 0.0),
    ],
)
def test_the_kernels_integers(state: int, status: int, offset: int, synchronized: bool, offset_seconds: float) -> None:
    answer = timex.decode(state, status, offset, 250, 16_000_000)
    assert (answer.synchronized, answer.offset_seconds) == (synchronized, pytest.approx(offset_seconds))
    assert (answer.estimated_error_seconds, answer.maximum_error_seconds) == (pytest.approx(250e-6), 16.0)


def test_a_kernel_that_may_not_be_asked_matters_only_without_chrony(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = Fault(subject="kernel clock", reason="AdjtimexDenied", detail="Operation not permitted", remedy="x")
    monkeypatch.setattr(timex, "read", lambda: denied)
    monkeypatch.setattr(chrony, "read_tracking", lambda: None)
    result = Checked("clock_skew").run(Node())
    assert (result.verdict.status.name, result.verdict.reason) == ("UNKNOWN", "AdjtimexDenied")
    monkeypatch.setattr(chrony, "read_tracking", lambda: chrony.parse_tracking(TRACKING))
    result = Checked("clock_skew").run(Node())
    assert (result.verdict.status.name, result.faults) == ("OK", ())


def test_tracking_as_chronyc_prints_it() -> None:
    told = chrony.Tracking(source="time.example", stratum=3, offset_seconds=0.000012, synchronized=True)
    assert chrony.parse_tracking(TRACKING) == told


def test_no_chrony_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda *arguments, **others: None)
    assert chrony.read_tracking() is None


def test_chronyc_that_does_not_end_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_program(tmp_path / "chronyc", "exec sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(chrony, "DEADLINE_SECONDS", 0.3)
    answer = chrony.read_tracking()
    assert isinstance(answer, Fault) and answer.reason == "ChronyNoAnswer"


def test_chronyc_that_cannot_be_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The fake chronyc ignores SIGKILL until the test ends, as a process that is blocked in the kernel does.
    kept: list[subprocess.Popen[bytes]] = []
    write_program(tmp_path / "chronyc", "exec sleep 600")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(chrony, "DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: kept.append(child))
    began = time.monotonic()
    answers = [chrony.read_tracking(), chrony.read_tracking()]
    assert time.monotonic() - began < 100
    assert [isinstance(answer, Fault) and answer.reason for answer in answers] == ["ChronyNoAnswer"] * 2
    (child,) = kept  # no second chronyc is started
    os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: child.poll() is not None, "its end")


@contextmanager
def real_chronyd(folder: Path) -> Iterator[int]:
    """Run a chronyd on loopback that sets no clock, and yield its command port."""
    program = shutil.which("chronyd", path="/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("chronyd is not installed: apt-get install chrony")
    ntp, command = free_port(), free_port()
    settings = folder / "chrony.conf"
    settings.write_text(
        f"local stratum 9\nallow 127.0.0.1\nport {ntp}\nbindaddress 127.0.0.1\ncmdport {command}\n"
        f"bindcmdaddress 127.0.0.1\nbindcmdaddress /\npidfile {folder}/chronyd.pid\ndriftfile {folder}/drift\n"
    )
    with spawn(program, "-x", "-d", "-u", "root", "-f", settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        yield command


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: chronyd starts as root only")
def test_a_real_chronyd_on_loopback(tmp_path: Path) -> None:
    with real_chronyd(tmp_path) as command:
        arguments = ("-h", "127.0.0.1", "-p", str(command))
        answer = wait_for(lambda: chrony.read_tracking(arguments), "an answer of chronyd")
        assert isinstance(answer, chrony.Tracking)
        assert answer.stratum == 9 and abs(answer.offset_seconds) < 0.001
        assert not answer.synchronized, "it has no source but its own clock"
    assert chrony.read_tracking(arguments) is None, "chrony is installed and does not run"
