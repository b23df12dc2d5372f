"""The daemon is ended while it writes an incident: nothing of it is lost, and what is given up is logged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.daemon.context import Common
from hangwatch.daemon.incident_writer import Keeping
from hangwatch.demo.simulated_node import SimulatedNode
from hangwatch.formats import incident_file
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.schedule import Beats
from hangwatch.stacks import activity
from hangwatch.state.board import Board
from hangwatch.state.steps import SaveIncident
from hangwatch.store import Store
from tests import samples
from tests.dead_mount import dead_mount
from tests.other_users import needs_root
from tests.soak import sigterms_at_writes as sigterms

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("seed", range(3))
def test_sigterm_while_an_incident_is_written_keeps_it(fake_nvml_library: Path, tmp_path: Path, seed: int) -> None:
    """All 50: python -m tests.soak.sigterms_at_writes"""
    with SimulatedNode(sigterms.RANKS) as node:
        node.order(1, "lock")
        driver = sigterms.driver_of(fake_nvml_library, tmp_path / "gpus.scenario", node)
        assert sigterms.once(driver.environ, tmp_path / "hw", node.run_id, seed) in sigterms.KEPT


@contextmanager
def keeping_in(folder: Path) -> Iterator[Keeping]:
    """The incidents of a daemon whose beats have ended, with a store that works."""
    kept = Store(folder)
    kept.make_writable()
    board = Board()
    board.set(store_problem=None)
    common = Common(
        settings=config.Settings(),
        node="gpu-a12",
        board=board,
        beats=Beats(lambda _: None),
        gpus=NvmlSampler(sample_seconds=1.0, deadline_seconds=1.0),
        proc_root=Path("/proc"),
        activities=activity.load(),
        stop=threading.Event(),
        do=lambda _: None,
        clock=time.monotonic,
    )
    yield Keeping(common, kept)


def test_incident_that_waits_for_its_turn_is_written_at_the_end(tmp_path: Path) -> None:
    with keeping_in(tmp_path) as keeping:
        keeping.save(SaveIncident(incident=samples.loader_hang(), is_watched=False))
        keeping.finish()
    (folder,) = Store(tmp_path).incidents.iterdir()
    assert incident_file.load(folder).incident_id == samples.loader_hang().incident_id


@needs_root
def test_incident_that_the_disk_does_not_take_is_given_up_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with keeping_in(tmp_path) as keeping, dead_mount(tmp_path / "incidents"):
        keeping.save(SaveIncident(incident=samples.loader_hang(), is_watched=False))
        began = time.monotonic()
        keeping.finish(0.5)
        assert time.monotonic() - began < 30.0
        (said,) = caplog.messages
    name = samples.loader_hang().incident_id
    assert f"incident {name} is given up" in said and "the store did not take it within 0.5 s" in said


def test_marker_is_listed_and_explained_to_a_reader(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.make_writable()
    kept.mark(samples.loader_hang())
    listed = _hangwatch(tmp_path, "incidents")
    assert "not written" in listed.stdout and samples.loader_hang().verdict.message in listed.stdout
    report = _hangwatch(tmp_path, "report")
    assert report.returncode == 2 and "hangwatch ended before it could write more than this line" in report.stderr
    assert "Traceback" not in listed.stderr + report.stderr


def _hangwatch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    chosen = folder / "hangwatch.toml"
    chosen.write_text(f'[store]\ndirectory = "{folder}"\n')
    command = [sys.executable, "-m", "hangwatch", *arguments, "--config", str(chosen)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
