"""The end of a daemon that writes an incident: nothing is lost, and the log lists each abandoned task."""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.daemon.context import DaemonContext
from hangwatch.daemon.incident_writer import IncidentWriter
from hangwatch.formats import incident_file
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.schedule.scheduler import Schedule
from hangwatch.stacks import activity
from hangwatch.state.board import Board
from hangwatch.state.steps import SaveIncident
from hangwatch.store import Store, StoreTakenError
from tests import samples
from tests.commands import HANGWATCH, Finished, finished, write_config
from tests.conftest import wait_for
from tests.dead_mount import dead_mount
from tests.integration.test_secrets_in_exceptions import DyingRank
from tests.other_users import needs_root
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode
from tests.soak import sigterms


@pytest.mark.parametrize("seed", range(3))
def test_sigterm_while_an_incident_is_written_keeps_it(fake_nvml_library: Path, tmp_path: Path, seed: int) -> None:
    """Run some of the seeds of `python -m tests.soak.sigterms`."""
    with SimulatedNode(sigterms.RANKS) as node:
        node.order(1, "lock")
        driver = sigterms.driver_of(fake_nvml_library, tmp_path / "gpus.scenario", node)
        assert sigterms.once(driver.environ, tmp_path / "hw", node.run_id, seed) in sigterms.KEPT


def keeping_in(folder: Path) -> tuple[DaemonContext, IncidentWriter]:
    """Return the context and the incident writer of a daemon. Its tasks have ended, its store works."""
    kept = Store(folder)
    kept.make_writable()
    board = Board()
    board.set(store_problem=None)
    common = DaemonContext(
        settings=config.Settings(),
        node="gpu-a12",
        board=board,
        schedule=Schedule(lambda _: None),
        gpus=NvmlSampler(sample_seconds=1.0, deadline_seconds=1.0),
        proc_root=Path("/proc"),
        activities=activity.load(),
        stop=threading.Event(),
        do_actions=lambda _: None,
        clock=time.monotonic,
        running_steps=[],
    )
    return common, IncidentWriter(common, kept)


def test_incident_that_waits_for_its_turn_is_written_at_the_end(tmp_path: Path) -> None:
    _, keeping = keeping_in(tmp_path)
    keeping.save(SaveIncident(incident=samples.loader_hang(), is_watched=False))
    keeping.finish()
    (folder,) = Store(tmp_path).incidents.iterdir()
    assert incident_file.load(folder).incident_id == samples.loader_hang().incident_id


def test_removed_state_directory_is_made_and_locked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state"
    state.mkdir()
    common, keeping = keeping_in(state)
    keeping.refuse_second_daemon()
    shutil.rmtree(state)
    keeping.save(SaveIncident(incident=samples.loader_hang(), is_watched=False))
    keeping.finish()
    assert any("incidents are not stored" in message and str(state) in message for message in caplog.messages)
    keeping._tend_store()
    assert common.board.snapshot.store_problem is None
    with pytest.raises(StoreTakenError):
        Store(state).lock.take()
    assert (state / "incidents").is_dir()


@needs_root
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
def test_store_that_cannot_be_written_is_a_problem_until_it_can(small_disk: Path, is_full: bool) -> None:
    filler, words = small_disk / "filler", "the disk is full" if is_full else "read-only"
    common, keeping = keeping_in(small_disk / "state")
    if is_full:
        with suppress(OSError):
            filler.write_bytes(bytes(4 << 20))
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for write in (keeping._write_pending, keeping._tend_store):
        keeping.save(SaveIncident(incident=samples.loader_hang(), is_watched=False))
        write()
        assert words in (common.board.snapshot.store_problem or "no problem")
    if is_full:
        filler.unlink()
    else:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    keeping._tend_store()
    assert common.board.snapshot.store_problem is None
    keeping._write_pending()
    (folder,) = Store(small_disk / "state").incidents.iterdir()
    assert incident_file.load(folder).incident_id == samples.loader_hang().incident_id


def test_hang_handed_over_late_is_written_or_given_up_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go_on, begun = threading.Event(), threading.Event()
    incident = samples.loader_hang()

    common, keeping = keeping_in(tmp_path)

    def hand_over() -> None:
        with common.running(incident.job.name.in_log, "the scan after its capture"):
            begun.set()
            go_on.wait(60)
            keeping.save(SaveIncident(incident=incident, is_watched=False))

    capture = threading.Thread(target=hand_over)
    capture.start()
    assert begun.wait(60)
    keeping.finish(0.2)
    (said,) = caplog.messages
    assert incident.job.name.in_log in said and "is lost: the scan after its capture did not end" in said
    threading.Timer(0.3, go_on.set).start()
    keeping.finish(60.0)
    capture.join(60)
    (folder,) = Store(tmp_path).incidents.iterdir()
    assert incident_file.load(folder).incident_id == incident.incident_id
    assert len(caplog.messages) == 1


def test_sigterm_while_crashes_are_read_keeps_them(tmp_path: Path) -> None:
    with RealDaemon(tmp_path / "hw", {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) as daemon, ExitStack() as stack:
        ranks = [DyingRank(tmp_path, f"r{number}") for number in range(2)]
        for rank in ranks:
            stack.callback(rank.end)
        for rank in ranks:
            wait_for(lambda job=rank.job_id: daemon.samples("hangwatch_job_ranks", job_id=job), rank.job_id, 200)
        for rank in ranks:
            rank.die_of("bad shard")
        for rank in ranks:
            wait_for(lambda job=rank.job_id: daemon.job_state(job) == "ended", f"{rank.job_id} to end", 60)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        log = daemon.log
    kept = [path.parent.name for path in (daemon.state / "incidents").glob("*/incident.json")]
    for rank in ranks:
        given_up = f"job {rank.job_id} " in log and "is lost: reading the crash artifacts of its dead ranks" in log
        assert any(rank.job_id in name for name in kept) or given_up, log


@needs_root
def test_incident_that_disk_does_not_take_is_given_up_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, keeping = keeping_in(tmp_path)
    with dead_mount(tmp_path / "incidents"):
        keeping.save(SaveIncident(incident=samples.loader_hang(), is_watched=False))
        began = time.monotonic()
        keeping.finish(0.5)
        assert time.monotonic() - began < 30.0
        (said,) = caplog.messages
    name = samples.loader_hang().incident_id
    assert (
        f"the last state of incident {name} was not written" in said
        and "the store did not write it within 0.5 s" in said
    )


def test_marker_is_listed_and_explained_to_a_reader(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.make_writable()
    kept.mark(samples.loader_hang())
    listed = _hangwatch(tmp_path, "incidents")
    assert "not written" in listed.stdout and samples.loader_hang().verdict.message in listed.stdout
    report = _hangwatch(tmp_path, "report")
    assert report.returncode == 2 and "hangwatch ended before it could write more than this line" in report.stderr
    assert "Traceback" not in listed.stderr + report.stderr


def _hangwatch(folder: Path, *arguments: str) -> Finished:
    return finished(*HANGWATCH, *arguments, "--config", write_config(folder, folder))
