"""The environment variables that a scan keeps of a process, from /proc-like files of any size."""

from pathlib import Path

import pytest

from hangwatch.checks import environment, network
from hangwatch.jobs import collective_timeout
from hangwatch.probes.process import environment as environments
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.tables import launchers
from tests.proc_tree import lay_out

RANK = "1 (init) S parent=0 start=1\n7 (python) S parent=1 start=9\n $ python train.py\n + RANK=3 WORLD_SIZE=4\n"


def write(folder: Path, *entries: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "environ").write_text("".join(f"{entry}\0" for entry in entries))
    if not (folder / "stat").exists():
        (folder / "stat").write_text("7 (python) S\n")
    return str(folder)


def noise(size_bytes: int) -> list[str]:
    return [f"NCCL_NOISE_{number}={'x' * 990}" for number in range(size_bytes // 1000)]


@pytest.mark.parametrize("place", ["before", "behind", "between"])
def test_variables_at_both_ends_of_a_large_environment_are_found(tmp_path: Path, place: str) -> None:
    count = {"before": 1, "behind": 0, "between": 2}[place]
    entries = [*noise(3_000_000 if count else 0), "RANK=3", *noise(3_000_000 if count != 1 else 0)]
    answer = environments.read(write(tmp_path, *entries), {"RANK"})
    assert answer.variables == ({} if place == "between" else {"RANK": "3"})
    assert not answer.complete


def test_cut_entry_is_dropped(tmp_path: Path) -> None:
    whole = environments.READ_BYTES // 2
    answer = environments.read(write(tmp_path, "A" * (whole - 10), "RANK=123456789012345", *noise(3_000_000)), {"RANK"})
    assert answer.variables == {}


def test_kept_variables_are_bounded_and_wanted_ones_come_first(tmp_path: Path) -> None:
    shown = [f"NCCL_{number}" for number in range(100)]
    folder = write(tmp_path, *(f"{name}={'y' * 5000}" for name in shown), "RANK=3", "USER=" + "z" * 5000)
    answer = environments.read(folder, {"RANK", "USER"}, shown)
    assert answer.variables["RANK"] == "3"
    assert answer.variables["USER"] == "z" * environments.VALUE_CHARACTERS
    assert sum(len(name) + len(value) for name, value in answer.variables.items()) <= environments.KEPT_CHARACTERS
    assert not answer.complete


def test_command_line_is_cut_to_64_arguments(tmp_path: Path) -> None:
    lay_out(RANK, tmp_path)
    (tmp_path / "7" / "cmdline").write_bytes(b"python\0train.py\0" + b"\0" * 32768 + b"x\0")
    (found,) = (one for one in ProcessScan(tmp_path).processes() if one.id.pid == 7)
    assert found.cmdline[:2] == ("python", "train.py")
    assert len(found.cmdline) <= 64


def test_unwanted_names_are_dropped(tmp_path: Path) -> None:
    text = RANK + " + NCCL_DEBUG=INFO NCCL_NOISE=1 TORCH_NCCL_SECRET=2 TORCH_FR_X=3\n"
    (found,) = (one for one in ProcessScan(lay_out(text, tmp_path)).processes() if one.id.pid == 7)
    assert found.environ == {"RANK": "3", "WORLD_SIZE": "4", "NCCL_DEBUG": "INFO"}


def test_large_environment_without_a_rank_is_a_fault(tmp_path: Path) -> None:
    lay_out(RANK, tmp_path)
    write(tmp_path / "7", *noise(500_000), "RANK=3", *noise(500_000))
    (found,) = (one for one in ProcessScan(tmp_path).processes() if one.id.pid == 7)
    (fault,) = found.faults
    assert (found.environ, fault.reason) == ({}, "TooLarge")
    assert "256 KiB" in fault.detail


def test_variables_of_checks_are_allowed_in_incidents() -> None:
    asked = {name for rule in environment.rules() for name in rule.variables}
    asked |= collective_timeout.VARIABLES | network.VARIABLES
    assert asked <= launchers.VARIABLES | launchers.SHOWN
