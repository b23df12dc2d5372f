"""The table of system calls: each number is unique and equals that of the kernel's headers."""

import platform
import re
from pathlib import Path

import pytest

from hangwatch.probes.process import system_calls

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


def test_system_calls_of_an_unknown_architecture_are_empty() -> None:
    assert system_calls.names_by_number("riscv64") == {}
    assert system_calls.names_by_number(platform.machine()) == system_calls.names_by_number()
