"""The scripts with which Slurm and node-problem-detector run `hangwatch check`, and the real command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Finished, finished, write_program

DEPLOY = Path(__file__).parents[2] / "deploy"
WELL = '[checks.network]\ninterfaces = ""\n'
SICK = '[checks.network]\ninterfaces = "=nosuch0"\n'
MISTYPED = "[checks.network]\ninterface = 1\n"

SCONTROL = """echo "$@" >> {calls}
case "$*" in *show*) cat {state} ;; esac
"""


class Site:
    """A node with hangwatch, a configuration, and a fake scontrol that records its calls."""

    def __init__(self, folder: Path) -> None:
        self.config, self.calls, self.state = folder / "hangwatch.toml", folder / "calls", folder / "state"
        self.config.write_text(WELL)
        self.calls.write_text("")
        self.state.write_text("NodeName=n1 State=IDLE Reason=\n")
        self.scontrol = write_program(folder / "scontrol", SCONTROL.format(calls=self.calls, state=self.state))
        program = "from hangwatch.cli import main; main()"
        command = f'exec {sys.executable} -c "{program}" "$@" --config {self.config}'
        self.hangwatch = write_program(folder / "hangwatch", command)

    def run(self, script: str, *arguments: str, check: str = "network") -> Finished:
        environ = {
            **os.environ,
            "HANGWATCH": str(self.hangwatch),
            "HANGWATCH_CHECK": f"{self.hangwatch} check {check} --fail-on critical",
            "SCONTROL": str(self.scontrol),
            "SLURMD_NODENAME": "n1",
        }
        return finished(DEPLOY / script, *arguments, env=environ)

    def updates(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("update")]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(("config", "code"), [(WELL, 0), (SICK, 1), (MISTYPED, 0)])
def test_the_prolog_refuses_jobs_on_a_sick_node_only(site: Site, config: str, code: int) -> None:
    site.config.write_text(config)
    assert site.run("slurm/hangwatch-prolog.sh").returncode == code


def test_the_health_check_drains_with_the_finding_as_reason(site: Site) -> None:
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == []
    site.config.write_text(SICK)
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == ["update NodeName=n1 State=DRAIN Reason=hangwatch: network NoInterface"]


def test_the_health_check_takes_back_its_own_drain_only(site: Site) -> None:
    site.state.write_text("NodeName=n1 State=IDLE+DRAIN Reason=hangwatch: network NoInterface [root@t]\n")
    site.config.write_text(SICK)
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == [], "it is drained already"
    site.config.write_text(WELL)
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == ["update NodeName=n1 State=RESUME"]
    site.calls.write_text("")
    site.state.write_text("NodeName=n1 State=IDLE+DRAIN Reason=bad cable [anna@t]\n")
    site.run("slurm/hangwatch-healthcheck.sh")
    site.config.write_text(SICK)
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == []


REPORT = """#!/bin/sh
cat <<END
UNKNOWN   clock_skew       NoClock: no NTP daemon is running
{status}   gpu_health       {reason}: {said}
END
"""


@pytest.mark.parametrize(
    ("status", "reason", "updates"),
    [("UNKNOWN ", "Stalled", []), ("OK      ", "GpusHealthy", ["update NodeName=n1 State=RESUME"])],
)
def test_check_that_cannot_tell_keeps_its_drain(site: Site, status: str, reason: str, updates: list[str]) -> None:
    site.state.write_text("NodeName=n1 State=IDLE+DRAIN Reason=hangwatch: gpu_health GpuLost [root@t]\n")
    site.hangwatch.write_text(REPORT.format(status=status, reason=reason, said="what it said"))
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == updates


def test_a_mistyped_configuration_neither_drains_nor_resumes(site: Site) -> None:
    site.config.write_text(MISTYPED)
    site.run("slurm/hangwatch-healthcheck.sh")
    site.state.write_text("NodeName=n1 State=IDLE+DRAIN Reason=hangwatch: xid GpuError [root@t]\n")
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == []


@pytest.mark.parametrize("status", [2, 3, 70, 124, 127])
def test_without_a_finding_no_exit_code_drains_or_resumes(site: Site, status: int) -> None:
    """Try these exit codes: 2 a mistyped option, 70 a bug of hangwatch, 124 a timeout, 127 a missing program."""
    site.hangwatch.write_text(f"#!/bin/sh\necho 'OK        pcie        fine'\nexit {status}\n")
    if status == 127:
        site.hangwatch.unlink()
    assert site.run("slurm/hangwatch-prolog.sh").returncode == 0
    site.run("slurm/hangwatch-healthcheck.sh")
    site.state.write_text("NodeName=n1 State=IDLE+DRAIN Reason=hangwatch: gpu_health GpuLost [root@t]\n")
    site.run("slurm/hangwatch-healthcheck.sh")
    assert site.updates() == []


@pytest.mark.parametrize(
    ("config", "check", "code", "line"),
    [
        (WELL, "network", 0, "this node is fit to train"),
        (SICK, "network", 1, "network NoInterface"),
        (WELL, "no_such_check", 2, "hangwatch check did not respond"),
        (MISTYPED, "network", 2, "hangwatch check did not respond"),
    ],
)
def test_the_plugin_of_node_problem_detector(site: Site, config: str, check: str, code: int, line: str) -> None:
    site.config.write_text(config)
    answer = site.run("node-problem-detector/hangwatch-plugin.sh", check)
    assert (answer.returncode, answer.stdout) == (code, f"{line}\n")
    assert len(answer.stdout) <= 80


def test_the_monitor_names_the_plugin_and_leaves_it_time() -> None:
    monitor = json.loads((DEPLOY / "node-problem-detector" / "hangwatch-monitor.json").read_text())
    (condition,), (rule,) = monitor["conditions"], monitor["rules"]
    assert rule["condition"] == condition["type"]
    assert rule["path"].endswith("hangwatch-plugin.sh")
    assert 20 < int(rule["timeout"].rstrip("s")) < int(monitor["pluginConfig"]["timeout"].rstrip("s"))


@pytest.mark.parametrize(
    "script", sorted(DEPLOY.glob("slurm/*.sh")) + sorted(DEPLOY.glob("node-problem-detector/*.sh"))
)
def test_the_scripts_are_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    shell = script.read_text().splitlines()[0].removeprefix("#!")
    assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0
