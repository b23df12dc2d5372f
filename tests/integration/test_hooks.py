"""Hooks of a real daemon: run when a job hangs, listed in the report, and refused at the start if they cannot run."""

import urllib.request
from pathlib import Path

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from hangwatch import config
from hangwatch.formats import incident_file
from hangwatch.tools.demo import playback
from tests.commands import HANGWATCH, finished, write_program
from tests.conftest import wait_for
from tests.integration.test_daemon import quick_daemon
from tests.simulated.node import SimulatedNode


def test_a_job_that_hangs_calls_its_hook_and_the_report_tells_it(tmp_path: Path) -> None:
    hook = write_program(tmp_path / "hook.sh", 'echo "$HANGWATCH_STATE $1"; test -s "$1/incident.json"')
    wanted = config.Hooks(on_hung=(str(hook), "{incident}"))
    quicker = {
        "detector": replace(playback.settings(tmp_path).detector, hold_seconds=1.0),
        "capture": config.Capture(rounds=2, pause_seconds=0.3),
    }
    with SimulatedNode(2) as node, quick_daemon(node, tmp_path / "state", hooks=wanted, **quicker) as daemon:
        node.order(1, "lock")
        printed = "incidents/*/hooks/on_hung.txt"
        (kept,) = wait_for(lambda: list((tmp_path / "state").glob(printed)), "what the hook printed")
        folder = kept.parent.parent
        assert kept.read_text() == f"hung {folder}\n"
        told = "hook on_hung (hook.sh) ended with status 0 after"
        wait_for(lambda: told in (folder / "report.txt").read_text(), "the report to tell of the hook")
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        (family,) = (one for one in families if one.name == "hangwatch_hook_runs")
        runs = {(one.labels["event"], one.labels["outcome"]): one.value for one in family.samples}
        assert runs.pop(("hung", "ok")) == 1.0
        assert len(runs) == 5 and set(runs.values()) == {0.0}, "of the other outcomes, and of no other event"
        assert any(told in line.message for line in incident_file.load(folder).timeline)


def test_a_hook_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text('[hooks]\non_hung = ["/usr/bin/env", "{jobid}"]\n')
    done = finished(*HANGWATCH, "run", "--config", path)
    assert done.returncode == 2
    assert f"{path}: [hooks]: on_hung[1]: '{{jobid}}'" in done.stderr
