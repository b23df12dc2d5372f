"""Ranks that are stopped, or frozen by the freezer of a control group. The group and the capture are real."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.model import Signature
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis, diagnose
from tests.conftest import wait_for
from tests.integration import targets

QUICK = config.Capture(rounds=2, pause_seconds=0.2, dump_deadline_seconds=60.0)
V1 = Path("/sys/fs/cgroup/freezer")
V2 = next((root for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
           if (root / "cgroup.controllers").exists()), Path("/sys/fs/cgroup"))  # fmt: skip


@contextlib.contextmanager
def frozen(pid: int, root: Path) -> Iterator[str]:
    """Move the process to a new group below a frozen group. Yield the folder of the frozen group below /sys/fs/cgroup."""
    is_v1 = root == V1
    switch, held, free = ("freezer.state", "FROZEN", "THAWED") if is_v1 else ("cgroup.freeze", "1", "0")
    try:
        above = Path(tempfile.mkdtemp(prefix="hangwatch-test-", dir=root))
    except OSError as error:
        pytest.skip(f"needs a writable {root}: {error}")
    group = above / "job"
    try:
        if not (above / switch).exists():
            pytest.skip(f"{root} has no freezer")
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (above / switch).write_text(held)
        wait_for(lambda: _is_frozen(group, is_v1), "the group to be frozen")
        yield f"{root}/{above.name}".removeprefix("/sys/fs/cgroup")
    finally:
        with contextlib.suppress(OSError):
            (above / switch).write_text(free)
        with contextlib.suppress(OSError):
            (root / "cgroup.procs").write_text(str(pid))
        for folder in (group, above):
            if folder.exists():
                folder.rmdir()


def _is_frozen(group: Path, is_v1: bool) -> bool:
    if is_v1:
        return (group / "freezer.state").read_text() == "FROZEN\n"
    return "frozen 1" in (group / "cgroup.events").read_text()


def look(*pids: int) -> Diagnosis:
    taken = capture(job_of_pids(pids), CaptureRequest(settings=QUICK, node="here"))
    return diagnose(taken, QUICK, activity.load(), unix_now=0.0)


def thaw_command(root: Path, cgroup: str) -> str:
    value, file = ("THAWED", "freezer.state") if root == V1 else ("0", "cgroup.freeze")
    return f"`echo {value} > /sys/fs/cgroup{cgroup}/{file}`"


@contextlib.contextmanager
def sleeping_ranks(folder: Path) -> Iterator[list[int]]:
    """Start three processes that all sleep at the same line."""
    with contextlib.ExitStack() as stack:
        folders = [folder / str(number) for number in range(3)]
        for each in folders:
            each.mkdir()
        yield [stack.enter_context(targets.python(targets.SLEEPING, each)) for each in folders]


@pytest.mark.parametrize("root", [V1, V2], ids=["v1", "v2"])
def test_frozen_rank_among_sleeping_ranks_is_checked_first(tmp_path: Path, root: Path) -> None:
    with sleeping_ranks(tmp_path) as pids, frozen(pids[1], root) as cgroup:
        verdict = look(*pids).verdict
    assert [hint.pid for hint in verdict.check_first] == [pids[1]]
    assert verdict.next_step == f"thaw its control group: {thaw_command(root, cgroup)} on here"


def test_stopped_rank_among_sleeping_ranks_is_checked_first(tmp_path: Path) -> None:
    with sleeping_ranks(tmp_path) as pids:
        os.kill(pids[2], signal.SIGSTOP)
        targets.wait_for_state(pids[2], "T")
        verdict = look(*pids).verdict
        os.kill(pids[2], signal.SIGCONT)
    assert [hint.pid for hint in verdict.check_first] == [pids[2]]
    assert f"`kill -CONT {pids[2]}`" in verdict.next_step


@pytest.mark.parametrize("root", [V1, V2], ids=["v1", "v2"])
def test_a_rank_in_a_frozen_control_group_is_suspended_and_the_group_is_named(tmp_path: Path, root: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid, frozen(pid, root) as cgroup:
        seen = look(pid)
        (member,) = seen.grouping.members
        assert (member.signature, member.waits.frozen_cgroup) == (Signature.STOPPED, cgroup)
        assert member.kernel.state == ("D" if root == V1 else "S")  # v2 shows it as sleeping
        assert seen.verdict.kind == "Suspended"
        assert seen.verdict.message.endswith(f"is frozen: control group {cgroup} is frozen.")
        assert seen.verdict.next_step == f"thaw its control group: {thaw_command(root, cgroup)} on here"
        assert seen.grouping.groups[0].frames  # read without a pause: the process cannot stop


def test_a_rank_that_was_stopped_is_suspended_and_stays_stopped(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        os.kill(pid, signal.SIGSTOP)
        targets.wait_for_state(pid, "T")
        verdict = look(pid).verdict
        assert targets.state(pid) == "T"
    assert (verdict.kind, verdict.named) == ("Suspended", ())
    assert "scontrol suspend, a gang scheduler, `kill -STOP`" in verdict.message
