"""System calls: their table, and the end time of a sleep or timed wait, from arguments and memory."""

import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.probes.base import system_calls
from hangwatch.probes.process import call_timeout

ADDRESS = 0x7F00_0000_1000
REGISTER = st.integers(0, (1 << 64) - 1)
LAYOUTS = sorted({row.timeout for row in system_calls.calls_by_name().values()} - {""})


def pair(seconds: int, parts: int) -> bytes:
    return struct.pack("=qq", seconds, parts)


TIMEOUTS = {
    "a deadline": ("timespec", ADDRESS, pair(1030, 500_000_000), 1000.0, 30.5),
    "a length": ("timespec", ADDRESS, pair(40, 0), 0.0, 40.0),
    "a deadline that has passed": ("timespec", ADDRESS, pair(990, 0), 1000.0, 0.0),
    "a timeval": ("timeval", ADDRESS, pair(2, 250_000), 0.0, 2.25),
    "milliseconds below an undefined half": ("milliseconds", 0xDEAD_BEEF_0000_9C40, b"", 0.0, 40.0),
    "poll without an end": ("milliseconds", 0xFFFF_FFFF, b"", 0.0, None),
    "no pointer": ("timespec", 0, b"", 0.0, None),
    "not readable": ("timespec", ADDRESS, b"", 0.0, None),
    "negative": ("timespec", ADDRESS, pair(-1, 0), 0.0, None),
    "a second too many nanoseconds": ("timespec", ADDRESS, pair(1, 10**9), 0.0, None),
    "a second too many microseconds": ("timeval", ADDRESS, pair(1, 10**6), 0.0, None),
    "threading.TIMEOUT_MAX": ("timespec", ADDRESS, pair((1 << 63) - 1, 0), 0.0, None),
}


@pytest.mark.parametrize(("layout", "argument", "raw", "now", "left_seconds"), TIMEOUTS.values(), ids=TIMEOUTS)
def test_timeout_is_decoded(layout: str, argument: int, raw: bytes, now: float, left_seconds: float | None) -> None:
    assert call_timeout.decode_timeout(layout, argument, raw, now) == left_seconds


@given(layout=st.sampled_from(LAYOUTS), argument=REGISTER, raw=st.binary(max_size=32), now=st.floats(0, 1e10))
def test_hostile_timeout_is_bounded(layout: str, argument: int, raw: bytes, now: float) -> None:
    left = call_timeout.decode_timeout(layout, argument, raw, now)
    assert left is None or 0.0 <= left <= call_timeout.MOST_SECONDS


@given(name=st.sampled_from(["futex", "clock_nanosleep", "poll"]), arguments=st.lists(REGISTER, min_size=6, max_size=6))
def test_hostile_arguments_have_a_known_clock_or_none(name: str, arguments: list[int]) -> None:
    assert call_timeout.find_clock(name, arguments) in {None, -1, 0, 1}


@pytest.mark.parametrize(
    ("name", "arguments", "clock"),
    [
        ("futex", [0, 0x189], 0),  # Event.wait of Python 3.8
        ("futex", [0, 0x89], 1),  # Event.wait since Python 3.9
        ("futex", [0, 0x80], -1),
        ("futex", [0, 0x86], None),  # FUTEX_LOCK_PI
        ("clock_nanosleep", [1, 1], 1),  # time.sleep since Python 3.11
        ("clock_nanosleep", [0, 0], -1),
        ("clock_nanosleep", [7, 1], None),  # CLOCK_BOOTTIME
    ],
)
def test_clock_of_a_timeout(name: str, arguments: list[int], clock: int | None) -> None:
    assert call_timeout.find_clock(name, arguments) == clock


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
IN_HEADER = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)")
OTHER_NAMES = {"fstatat": "newfstatat"}  # asm-generic/unistd.h


@pytest.mark.parametrize("machine", HEADERS)
def test_system_call_numbers_are_unique(machine: str) -> None:
    known = [row.x86_64 if machine == "x86_64" else row.aarch64 for row in system_calls.calls_by_name().values()]
    numbers = [number for number in known if number is not None]
    assert len(set(numbers)) == len(numbers) == len(system_calls.names_by_number(machine)) > 60


@pytest.mark.parametrize("machine", HEADERS)
def test_system_call_numbers_match_the_kernel_headers(machine: str) -> None:
    # The headers are installed on machines that compile C.
    header = Path(HEADERS[machine])
    text = header.read_text() if header.exists() else ""
    found = {OTHER_NAMES.get(name, name): int(number) for name, number in IN_HEADER.findall(text)}
    named = {name: number for number, name in system_calls.names_by_number(machine).items()}
    assert not found or named.items() <= found.items()


def test_system_calls_with_an_argument_have_a_description() -> None:
    assert all(row.says.startswith(name) for name, row in system_calls.calls_by_name().items() if row.on)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
@pytest.mark.parametrize(("wchan", "name"), [("poll_schedule_timeout", "poll"), ("0", "restart_syscall")])
def test_stopped_call_that_goes_on_has_its_name(wchan: str, name: str, tmp_path: Path) -> None:
    thread = tmp_path / "7" / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "syscall").write_text("219 0x10 0x1 0x1388 0x1 0x0 0x0 0x20 0x30")
    (thread / "wchan").write_text(wchan)
    call = system_calls.read(7, tmp_path)
    assert call is not None and (call.name, call.arguments[:3]) == (name, (16, 1, 5000))


def test_system_calls_of_an_unknown_architecture_are_empty() -> None:
    assert system_calls.names_by_number("riscv64") == {}
    assert system_calls.names_by_number(platform.machine()) == system_calls.names_by_number()
