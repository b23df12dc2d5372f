"""The daemon from start to end: its messages to systemd, its work without a driver, its exit in time."""

import contextlib
import ctypes
import dataclasses
import os
import platform
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.checks import environment
from hangwatch.checks.framework import registry
from hangwatch.checks.framework.contract import ABSENT
from hangwatch.daemon import Daemon, node_checks
from hangwatch.formats import incident_file
from hangwatch.model import JobState
from hangwatch.state.board import JobEntry
from hangwatch.tools.demo import playback
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from tests.conftest import stopping, wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode

SYS_TGKILL = 131 if platform.machine() == "aarch64" else 234
NO_DRIVER = {**os.environ, "LD_LIBRARY_PATH": ""}


def receive_message(door: socket.socket, word: str, deadline_seconds: float = 60.0) -> str:
    """Return the first message to systemd that begins with `word`."""
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        door.settimeout(max(0.1, end - time.monotonic()))
        message = door.recv(4096).decode()
        if message.startswith(word):
            return message
    pytest.fail(f"systemd did not hear {word}")


def test_systemd_hears_ready_watchdog_status_and_stopping(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(address)
        environ = {**NO_DRIVER, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "4000000"}
        with RealDaemon(tmp_path / "hw", environ) as daemon:
            receive_message(door, "READY=1")
            receive_message(door, "WATCHDOG=1")
            receive_message(door, "WATCHDOG=1")
            assert " jobs" in receive_message(door, "STATUS=")
            daemon.process.send_signal(signal.SIGTERM)
            receive_message(door, "STOPPING=1")
            assert daemon.process.wait(60) == 0


def test_daemon_has_one_heap_and_lean_modules_and_ends_by_any_thread(tmp_path: Path) -> None:
    """Expect no second heap: glibc would reserve up to 64 MiB of address space for each. See `tests/unit/test_heap.py`.

    Then send SIGTERM to a thread other than the main thread. The kernel may choose any thread, and a sleeping main
    thread does not wake by itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with RealDaemon(tmp_path / "hw", {**NO_DRIVER, "PYTHONPROFILEIMPORTTIME": "1"}) as daemon:
        wait_for(lambda: len(daemon.samples("hangwatch_check_status")) > 10, "threads that have worked")
        maps = [line.split()[:2] for line in Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()]
        reserved = [[int(end, 16) for end in ends.split("-")] for ends, rights in maps if rights == "---p"]
        assert not [end - begin for begin, end in reserved if end - begin > 32 << 20]
        assert "hangwatch.checks.framework.registry" in daemon.log, "the list of modules"
        unused = ("hangwatch.logs", "hangwatch.tools", "cli.local_dump", "jinja2", "rich", "ClusterShell", "elftools")
        assert [module for module in unused if module in daemon.log] == []
        pid = daemon.process.pid
        others = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
        assert others
        assert libc.syscall(SYS_TGKILL, pid, others[-1], signal.SIGTERM) == 0
        assert daemon.process.wait(30) == 0


def test_without_a_driver_it_says_so_once_and_the_rest_works(tmp_path: Path) -> None:
    with RealDaemon(tmp_path / "hw", NO_DRIVER) as daemon:
        wait_for(lambda: daemon.samples("hangwatch_check_status", check="fd_limit"), "a check that needs no GPU")
        healthy = {"check": "gpu_health", "status": "OK", "reason": "NotPresent"}
        wait_for(lambda: daemon.samples("hangwatch_check_info", **healthy), "a check of GPUs that finds none")
        assert daemon.samples("hangwatch_gpu_sampler_up") == [({}, 0.0)]
        assert daemon.samples("hangwatch_gpu_power_watts") == []
        assert daemon.get("/healthz") == "ok\n"
        wait_for(lambda: "no GPU readings" in daemon.log, "a word about the driver")
        wait_for(lambda: daemon.samples("process_cpu_seconds_total")[0][1] > 0, "another tick of the schedule")
        said = [line for line in daemon.log.splitlines() if "no GPU readings" in line]
        assert len(said) == 1, daemon.log
        assert "install the NVIDIA driver" in said[0]


def test_job_without_gpu_readings_is_unknown_and_does_not_page(tmp_path: Path) -> None:
    with SimulatedNode(2) as node, RealDaemon(tmp_path / "hw", NO_DRIVER, detector={"hold_seconds": 1.0}) as daemon:
        daemon.wait_for_state(node.run_id, "unknown")
        assert [value for _, value in daemon.samples("hangwatch_job_page", job_id=node.run_id)] == [0.0]
        (job,) = [one for one in daemon.status()["jobs"] if one["job_id"] == node.run_id]
        assert (job["state"], job["page"]) == ("unknown", False)
        assert "a hang is not detected" in job["message"]


def test_a_driver_that_blocks_costs_the_gpu_checks_only(fake_driver: FakeDriver, tmp_path: Path) -> None:
    fake_driver.add("fault nvmlEventSetWait_v2 sleep")
    with RealDaemon(
        tmp_path / "hw", fake_driver.environ, gpu={"sample_seconds": 0.2, "deadline_seconds": 1.0}
    ) as daemon:
        wait_for(
            lambda: "did not answer" in daemon.log or "waiting for the driver" in daemon.log, "the stall in the log"
        )
        wait_for(lambda: daemon.samples("hangwatch_check_status", check="fd_limit"), "a check that needs no GPU")
        assert daemon.samples("hangwatch_gpu_sampler_up") == [({}, 0.0)]
        assert daemon.get("/healthz") == "ok\n"


def test_it_ends_in_time_in_the_middle_of_a_capture(fake_driver: FakeDriver, tmp_path: Path) -> None:
    slow = {"pause_seconds": 300.0}
    with SimulatedNode(4) as node, RealDaemon(tmp_path / "hw", fake_driver.environ, capture=slow) as daemon:
        fake_driver.write([*h100(4), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])
        daemon.wait_for_state(node.run_id, "training")
        fake_driver.add("gpu all power_watts 100")
        daemon.wait_for_state(node.run_id, "suspected")
        wait_for(lambda: daemon.samples("hangwatch_dump_seconds_count")[0][1] >= 4, "the first round of dumps")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0, "the capture would take ten minutes"
        assert all(node.is_alive(rank) for rank in range(4)), "hangwatch never ends a training process"


def test_a_store_that_cannot_be_written_costs_reports_and_not_the_watch(tmp_path: Path) -> None:
    """Continue to monitor while the disk is full or broken. Save the open incidents when the disk works again."""
    soon = "from hangwatch.daemon import incident_writer\nincident_writer.STORE_SECONDS = 1.0\n"
    (tmp_path / "sitecustomize.py").write_text(soon)
    environ = {**NO_DRIVER, "PYTHONPATH": str(tmp_path)}
    state = tmp_path / "taken"
    state.write_text("a file in the place of the folder")
    with RealDaemon(tmp_path / "hw", environ, store={"directory": str(state)}) as daemon:
        wait_for(lambda: "incidents are not stored" in daemon.log, "a word about the store")
        assert daemon.samples("hangwatch_store_up") == [({}, 0.0)]
        assert str(state) in str(daemon.status()["store"])
        state.unlink()
        wait_for(lambda: daemon.samples("hangwatch_store_up") == [({}, 1.0)], "the store to come back")
        assert (state / "incidents").is_dir() and daemon.status()["store"] == "ok"


def test_healthy_work_is_never_dumped(fake_driver: FakeDriver, tmp_path: Path) -> None:
    with SimulatedNode(4) as node, RealDaemon(tmp_path / "hw", fake_driver.environ) as daemon:
        fake_driver.write([*h100(4), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])
        daemon.wait_for_state(node.run_id, "training")
        sampled = daemon.samples("hangwatch_gpu_energy_joules_total")
        assert sampled
        end = time.monotonic() + 6  # twice the hold
        while time.monotonic() < end:
            for pid in node.pids:
                assert "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text()
            time.sleep(0.02)
        assert daemon.samples("hangwatch_dump_seconds_count")[0][1] == 0
        assert daemon.job_state(node.run_id) == "training"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: takes the right to read other processes from the daemon")
def test_without_the_right_to_dump_the_incident_says_what_is_missing(fake_driver: FakeDriver, tmp_path: Path) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv (util-linux)")
    with (
        SimulatedNode(4) as node,
        RealDaemon(tmp_path / "hw", fake_driver.environ, prefix=[setpriv, "--bounding-set=-sys_ptrace"]) as daemon,
    ):
        fake_driver.write([*h100(4), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])
        job_id = wait_for(lambda: _job_of_four_gpus(daemon), "a job with an unreadable environment")
        daemon.wait_for_state(job_id, "training")
        fake_driver.add("gpu all power_watts 100")
        daemon.wait_for_state(job_id, "stalled")
        (row, _) = daemon.samples("hangwatch_incident_info", job_id=job_id)[0]
        folder = daemon.state / "incidents" / row["incident"]
        wait_for((folder / "incident.json").exists, "the incident")
        assert "CAP_SYS_PTRACE" in (folder / "report.txt").read_text()
        assert incident_file.load(folder).verdict.named == ()
        assert daemon.samples("hangwatch_dump_failures_total", reason="PermissionDenied")[0][1] >= 4
        assert daemon.samples("hangwatch_job_page", job_id=job_id)[0][1] == 0, "what cannot be seen does not page"


@contextlib.contextmanager
def quick_daemon(node: SimulatedNode, folder: Path, **sections: object) -> Iterator[Daemon]:
    """Run a daemon with short holds over a simulated node. Yield it when the node's job trains."""
    gpus = SimulatedGpus(node)
    daemon = Daemon(replace(playback.settings(folder), **sections), gpus, proc_root=node.proc_root)
    daemon.board.set(sweep=gpus.latest())  # the first scan needs to know which process holds which GPU
    daemon.start()
    with stopping(daemon):
        wait_for(lambda: state_of(daemon) is JobState.TRAINING, "the job to train")
        wait_for(lambda: all(gpu.busy_watts for gpu in job_of(daemon).watch.power.gpus.values()), "busy levels")
        yield daemon


def job_of(daemon: Daemon) -> JobEntry:
    """Return the only job of the daemon's node."""
    (entry,) = daemon.board.snapshot.jobs.values()
    return entry


def state_of(daemon: Daemon) -> JobState | None:
    return job_of(daemon).watch.state if daemon.board.snapshot.jobs else None


def test_a_look_that_fails_as_a_whole_loses_no_hang(tmp_path: Path) -> None:
    """Make the capture itself raise, as if no thread could be started. No configuration causes this."""
    with SimulatedNode(2) as node, quick_daemon(node, tmp_path, capture=config.Capture(parallel=0)) as daemon:
        node.order(1, "lock")
        wait_for(lambda: state_of(daemon) is JobState.STALLED, "the job to be held as stalled")
        wait_for(lambda: job_of(daemon).watch.open_incident.capture_wanted_at is not None, "another look to be wanted")
        assert daemon.board.snapshot.captures["failed"] >= 1
        assert not job_of(daemon).page, "no stack was taken"


@contextlib.contextmanager
def counted_looks(
    node: SimulatedNode, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Daemon, list[int]]]:
    """Run a daemon with one check. Yield also the number of jobs at each of its runs."""
    looks: list[int] = []
    check = registry.checks()["environment"]
    counted = dataclasses.replace(
        check, observe=lambda seen, settings: looks.append(len(seen.jobs)) or check.observe(seen, settings)
    )
    monkeypatch.setattr(registry, "checks", lambda: {"environment": counted})
    daemon = Daemon(
        playback.settings(folder),
        SimulatedGpus(node),
        proc_root=node.proc_root,
        check_settings={"environment": environment.Settings()},
    )
    daemon.start()
    with stopping(daemon):
        yield daemon, looks


def check_reason(daemon: Daemon) -> str:
    found = daemon.board.snapshot.checks.get("environment")
    return found.verdict.reason if found else ""


def test_a_check_that_found_no_job_looks_again_when_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the status page would show "no training job runs on this node" next to the job."""
    monkeypatch.setattr(node_checks, "CHECK_AGAIN_SECONDS", 0.1)
    node = SimulatedNode(2)
    with counted_looks(node, tmp_path, monkeypatch) as (daemon, looks):
        wait_for(lambda: check_reason(daemon) == ABSENT, "the check to find no job")
        with node:
            wait_for(lambda: check_reason(daemon) not in ("", ABSENT), "the check to find the job")
            assert looks == [0, 1], "once, and again for the job"
            node.restart()
            scans = daemon.board.snapshot.scan_seconds
            wait_for(lambda: daemon.board.snapshot.scan_seconds != scans, "a further scan")
            assert looks == [0, 1], "it has had something to look at"


def test_first_run_of_a_check_knows_the_jobs_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedNode(2) as node, counted_looks(node, tmp_path, monkeypatch) as (daemon, looks):
        wait_for(lambda: check_reason(daemon) != "", "the first run")
        assert looks == [1]


def test_jobs_that_hang_together_are_looked_at_together(tmp_path: Path) -> None:
    """Capture hung jobs in parallel: a capture mostly sleeps, and dead storage stops many jobs at once."""
    rounds = config.Capture(rounds=2, pause_seconds=60.0, parallel=1)
    with SimulatedNode(2) as node, SimulatedNode(2) as other:
        for pid in other.proc_root.glob("[0-9]*"):
            (node.proc_root / pid.name).symlink_to(f"/proc/{pid.name}")
        daemon = Daemon(
            replace(playback.settings(tmp_path), capture=rounds), SimulatedGpus(node, other), proc_root=node.proc_root
        )
        daemon.start()
        with stopping(daemon):
            wait_for(
                lambda: [one.watch.state for one in daemon.board.snapshot.jobs.values()] == [JobState.TRAINING] * 2,
                "both jobs to train",
            )
            node.order(0, "lock")
            other.order(0, "lock")
            wait_for(lambda: len(daemon.board.snapshot.running.get("capture", ())) == 2, "two captures at once")
            wait_for(lambda: sum(daemon.board.snapshot.dumps.counts) >= 8, "the first round of both")


def test_captures_that_wait_while_a_scan_runs_share_the_next_one(tmp_path: Path) -> None:
    """With 10,000 processes, one scan per capture delayed the page of another user by half a minute."""
    with (
        SimulatedNode(2) as node,
        quick_daemon(node, tmp_path, jobs=config.Jobs(discover_seconds=600.0)) as daemon,
    ):
        scans = daemon._scan._scans
        waiting = [threading.Thread(target=daemon._discover) for _ in range(8)]
        with daemon._scanning:
            for one in waiting:
                one.start()
            wait_for(lambda: all(_is_in(one, "_discover") for one in waiting), "all to wait for the scan")
        for one in waiting:
            one.join()
        assert daemon._scan._scans == scans + 1
        began = daemon._clock()
        daemon._discover()
        assert daemon._scan._scans == scans + 2, "a scan that began before the request does not count"
        daemon._discover(began)
        assert daemon._scan._scans == scans + 2, "one of after it is"


def _is_in(thread: threading.Thread, function: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == function


def test_a_job_that_ends_while_it_is_looked_at_has_ended_and_is_not_hung(tmp_path: Path) -> None:
    """Check in the capture itself that the processes still exist: the next scan would come too late."""
    rounds = config.Capture(rounds=2, pause_seconds=3.0)
    with (
        SimulatedNode(2) as node,
        quick_daemon(node, tmp_path, capture=rounds, jobs=config.Jobs(discover_seconds=600.0)) as daemon,
    ):
        node.order("all", "evaluation 600")
        ranks_and_loaders = 4
        wait_for(lambda: sum(daemon.board.snapshot.dumps.counts) >= ranks_and_loaders, "the first round")
        for pid in node.pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: state_of(daemon) is not JobState.SUSPECTED, "the end of the capture")
        assert state_of(daemon) is JobState.ENDED
        assert job_of(daemon).incident is None


def _job_of_four_gpus(daemon: RealDaemon) -> str | None:
    rows = [row["job_id"] for row, _ in daemon.samples("hangwatch_job_gpu_info")]
    return next((job_id for job_id in rows if rows.count(job_id) == 4), None)
