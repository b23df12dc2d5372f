"""The environment variables that a scan and a capture keep of a rank, and their differences between ranks."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.checks import environment, network
from hangwatch.jobs import collective_timeout
from hangwatch.model import Difference, RankId
from hangwatch.probes.base import procfs
from hangwatch.probes.process import environment as environments
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.tables import environment_names, launchers
from hangwatch.verdict import environment_diff
from tests.commands import spawn
from tests.conftest import wait_for
from tests.proc_tree import lay_out

RANKS = [RankId(node="n", rank=number, local_rank=number, pid=100 + number) for number in range(8)]


def compared(*environs: dict[str, str]) -> tuple[Difference, ...]:
    found = environment_diff.compare(dict(zip(RANKS, environs, strict=False)))
    return found.differences


@pytest.mark.parametrize(
    "name",
    ["NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "MASTER_ADDR", "OMP_NUM_THREADS", "PYTHONHASHSEED", "RANK"],
)
def test_what_explains_a_hang_is_kept(name: str) -> None:
    assert name in environment_names.ALLOWED


@pytest.mark.parametrize(
    "name",
    ["NCCL_AUTH", "TORCH_HUB_TOKEN", "TORCH_api_key", "CUDA_SECRET", "NCCL_my_Password", "PYTORCH_CREDENTIALS", "HOME",
     "WANDB_API_KEY", "HF_TOKEN", "PYTHONPATH", "nccl_debug", "SLURM_JOB_COMMENT", "", "\0"],
)  # fmt: skip
def test_what_may_be_a_secret_or_says_nothing_is_not(name: str) -> None:
    assert name not in environment_names.ALLOWED


@given(st.text(max_size=30), st.sampled_from(environment_names.TABLE.never), st.text(max_size=30))
def test_no_name_around_a_secret_word_is_ever_kept(before: str, pattern: str, after: str) -> None:
    assert f"NCCL_{before}{pattern.strip('*').lower()}{after}" not in environment_names.ALLOWED


def test_every_row_says_why() -> None:
    assert all(row.why and row.names for row in environment_names.TABLE.rows)


def test_the_rank_with_another_interface_is_told_with_what_the_others_have() -> None:
    ifname = "NCCL_SOCKET_IFNAME"
    (found,) = compared(*[{ifname: "eth0"}] * 3, {ifname: "eth1"}, *[{ifname: "eth0"}] * 4)
    assert environment_diff.describe_difference(found) == (
        "NCCL_SOCKET_IFNAME differs: eth1 on rank 3 (n, local rank 3, pid 103), eth0 on 7 others"
    )
    (vote,) = environment_diff.as_evidence(environment_diff.Environment(differences=(found,)), [RANKS[3]])
    assert (vote.supports, vote.ranks, vote.kind) == (None, (RANKS[3],), "environment")


def test_what_should_differ_and_what_each_has_of_its_own_is_left_out() -> None:
    assert compared(*({"RANK": str(n), "NCCL_HOSTID": f"h{n}", "CUDA_VISIBLE_DEVICES": str(n)} for n in range(8))) == ()


def test_a_variable_that_one_rank_lacks_differs() -> None:
    (found,) = compared({"NCCL_DEBUG": "INFO"}, {"RANK": "1"}, {"NCCL_DEBUG": "INFO"})
    assert environment_diff.describe_difference(found).startswith("NCCL_DEBUG differs: not set on rank 1")


def test_variables_of_suspects_come_first() -> None:
    both = [{"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "8"} for _ in range(8)]
    both[2]["NCCL_ALGO"], both[5]["OMP_NUM_THREADS"] = "Tree", "1"
    found = environment_diff.compare(dict(zip(RANKS, both, strict=True)))
    assert found is not None
    assert [vote.ranks for vote in environment_diff.as_evidence(found, [RANKS[5]])] == [(RANKS[5],), (RANKS[2],)]
    assert [vote.ranks for vote in environment_diff.as_evidence(found, [])] == [(RANKS[2],), (RANKS[5],)]


def test_a_thousand_names_and_long_values_of_a_hostile_owner_are_bounded() -> None:
    many = [{f"NCCL_X{n}": "x" * 1000 for n in range(1000)}, {"RANK": "1"}, {"RANK": "2"}]
    found = compared(*many)
    assert len(found) == 32
    assert all(len(setting.value or "") <= 200 for one in found for setting in one.settings)


def test_of_a_real_process_no_secret_is_read(tmp_path: Path) -> None:
    told = {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "hf_secret",
        "NCCL_API_KEY": "secret",
        "RANK": "3",
        "TORCH_X": "a\x1b[2Jb",
    }
    with spawn(sys.executable, "-c", "input()", env=told, text=False) as child:
        wait_for(lambda: environments.read_allowed(child.pid, procfs.PROC), "its environment")
        found = environments.read_allowed(child.pid, procfs.PROC)
    assert found == {"NCCL_DEBUG": "INFO", "RANK": "3", "TORCH_X": "a\\x1b[2Jb"}


def test_of_a_process_that_is_gone_nothing_is_read() -> None:
    assert environments.read_allowed(os.getpid(), Path("/nowhere")) == {}


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
