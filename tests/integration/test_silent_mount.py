"""Ranks with a Python on a FUSE mount that stops responding: py-spy blocks there, and SIGKILL does not end it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hangwatch import config, detector
from hangwatch.detector import job_watch
from hangwatch.detector.watch_parts import JobIdentity, Silence, Suspicion
from hangwatch.model import Job, JobName, JobState
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.process import pyspy
from hangwatch.state.steps import count_motion
from hangwatch.verdict.diagnosis import Diagnosis
from tests.conftest import wait_for
from tests.dead_mount import dying_mount
from tests.integration import targets

QUICK = config.Capture(rounds=3, pause_seconds=0.3, dump_deadline_seconds=2.0)
ASLEEP = "while True: time.sleep(600)"
SPINNING = "while True: pass"
READING = "wait('silent'); open(mount + '/data').read()"
READING_OPEN = "wait('silent'); os.read(data, 10)"
RANK = """
import os, sys, time
folder, mount, number = sys.argv[1:]
def wait(name):
    open(f"{folder}/up-{number}", "w").close()
    while not os.path.exists(f"{folder}/{name}"): time.sleep(0.02)
data = os.open(mount + "/data", os.O_RDONLY)
wait('go')
open(f"{folder}/went-{number}", "w").close()
"""


class Ranks(NamedTuple):
    job: Job
    fall_silent: Callable[[], None]


@contextlib.contextmanager
def ranks(folder: Path, *bodies: str) -> Iterator[Ranks]:
    """Start a rank for each program in `bodies`, with a Python on a FUSE mount."""
    program, data = Path(os.path.realpath(sys.executable)), folder / "content"
    data.write_text("x" * 4096)
    with dying_mount(folder / "mnt", {"python": program, "data": data}) as die:
        children = [
            subprocess.Popen(
                [folder / "mnt/python", "-c", f"{RANK}\n{body}", folder, folder / "mnt", str(number)],
                env={"PYTHONHOME": sys.base_prefix},
            )
            for number, body in enumerate(bodies)
        ]
        try:
            wait_for(lambda: len(list(folder.glob("up-*"))) == len(bodies), "the ranks to be up")
            (folder / "go").touch()
            wait_for(lambda: len(list(folder.glob("went-*"))) == len(bodies), "the ranks to stop waiting")
            job = targets.job_of([child.pid for child in children], job_key="x")

            def fall_silent() -> None:
                die()
                (folder / "silent").touch()
                for rank, body in zip(job.ranks, bodies, strict=True):
                    wait_for(lambda pid=rank.id.pid, body=body: settled(pid, body), "the ranks to settle")  # type: ignore[misc]

            yield Ranks(job, fall_silent)
        finally:
            for child in children:
                child.kill()
            subprocess.run(["umount", "-l", folder / "mnt"], check=False)
    for child in children:
        child.wait(timeout=60)
    wait_for(lambda: pyspy.DUMPER.abandoned.count() == 0, "the py-spys to end once the mount is gone")


def settled(pid: int, body: str) -> bool:
    if body is SPINNING:
        return targets.state(pid) == "R"
    wanted = "request_wait_answer" if body in (READING, READING_OPEN) else "nanosleep"
    return wanted in (procfs.read_counters(pid).wchan or "")


def look(job: Job, settings: config.Capture = QUICK) -> Diagnosis:
    return targets.diagnosed(job, settings)


def dumpers() -> int:
    """Return the number of py-spy processes that this process has started."""
    pids = procfs.read_children(os.getpid())
    return [pseudo_files.read_or_empty(f"/proc/{pid}/comm") for pid in pids].count("py-spy\n")


def test_while_the_mount_answers_there_are_stacks(tmp_path: Path) -> None:
    with ranks(tmp_path, ASLEEP, ASLEEP) as (job, _):
        seen = look(job, config.Capture(dump_deadline_seconds=60.0))
    assert [group.fault for group in seen.grouping.groups] == [None]
    assert not any(member.kernel.silent_mount for member in seen.grouping.members)


def test_a_process_on_which_a_py_spy_hangs_is_not_dumped_again(tmp_path: Path) -> None:
    with ranks(tmp_path, ASLEEP) as (job, fall_silent):
        fall_silent()
        target = job.ranks[0].id.pid
        first, second = (pyspy.dump(target, deadline_seconds=2.0) for _ in range(2))
        assert first.fault is not None and second.fault is not None
        assert (first.fault.reason, first.fault.about) == ("DumperStuck", "tool")
        assert first.fault == second.fault
        assert second.duration_seconds == 0.0, "no py-spy is started"
        assert (pyspy.DUMPER.abandoned.count(), dumpers()) == (1, 1)


def test_a_rank_that_reads_from_the_silent_mount_is_named_and_the_job_pages_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, SPINNING, READING, SPINNING) as (job, fall_silent):
        fall_silent()
        seen, again = look(job), look(job)
        assert (pyspy.DUMPER.abandoned.count(), dumpers()) == (3, 3), "one for each rank, however often it is asked"
    for one in (seen, again):
        assert one.verdict.kind == "MountSilent"
        assert [rank.rank for rank in one.verdict.named] == [1]
        assert f"{tmp_path}/mnt (fuse.deadfs) does not respond" in one.verdict.message
        (group,) = one.grouping.groups
        assert group.fault is not None and (group.fault.reason, group.fault.about) == ("DumperStuck", "tool")
        assert f"{tmp_path}/mnt" in group.fault.detail
        assert_pages(one)


def test_descriptor_tells_mount_where_no_place_in_kernel_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangwatch.capture.rank_dumps.FUSE_WAITS", frozenset())
    with ranks(tmp_path, SPINNING, READING_OPEN) as (job, fall_silent):
        fall_silent()
        seen = look(job)
    assert [member.kernel.waits_for_mount for member in seen.grouping.members] == [False, True]


def test_ranks_that_sleep_on_a_dead_mount_page_and_none_is_named(tmp_path: Path) -> None:
    with ranks(tmp_path, ASLEEP, ASLEEP) as (job, fall_silent):
        fall_silent()
        seen = look(job)
    assert (seen.verdict.kind, seen.verdict.named) == ("MountSilent", ())
    assert_pages(seen)


def test_ranks_that_compute_over_a_silent_mount_that_none_waits_for_are_not_judged(tmp_path: Path) -> None:
    with ranks(tmp_path, ASLEEP, SPINNING) as (job, fall_silent):
        fall_silent()
        seen = count_motion(look(job).grouping)
    assert (seen.frozen, seen.moving, seen.unknown) == (1, 0, 1)


def assert_pages(seen: Diagnosis) -> None:
    """Assert that a job is hung, and pages, after this capture and the ordinary hold."""
    count = count_motion(seen.grouping)
    assert (count.frozen, count.moving, count.unknown) == (len(seen.grouping.members), 0, 0)
    settings = config.Detector()
    identity = JobIdentity(name=JobName(job_id="x", job_key="x"), generation=frozenset(), began=0.0, has_ranks=True)
    suspected = job_watch.JobWatch(
        identity=identity,
        state=JobState.SUSPECTED,
        since=100.0,
        phase=None,
        silence=Silence(since=100.0),
        suspicion=Suspicion(),
    )
    watch, _ = detector.apply_capture(suspected, count, 110.0, settings)
    assert (watch.state, job_watch.should_page(watch, 110.0, settings)) == (JobState.HUNG, True)
