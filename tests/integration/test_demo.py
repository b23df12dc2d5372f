"""`hangwatch demo` and more scenarios with real processes, the real daemon and py-spy. Each scenario must give its expected verdict."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hangwatch.formats import incident_file
from hangwatch.model import JobState, RankId, Verdict
from hangwatch.tools.demo import playback
from tests.commands import finished
from tests.conftest import wait_for
from tests.scenarios.names import assert_names_do_not_matter
from tests.scenarios.stage import LookingDaemon
from tests.simulated.scenarios import SCENARIOS, Answer, Outcome, Watcher, answer, play

HANGWATCH = str(Path(sys.executable).with_name("hangwatch"))
HANGS = [
    name for name, scenario in SCENARIOS.items() if scenario.right_answer in (Answer.NAMES_PLANTED, Answer.NAMES_NOBODY)
]
HEALTHY = [name for name in SCENARIOS if name not in HANGS]
SERIES = ("stopped", "evaluation")  # `make test` runs another scenario with the same job states


def row(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.series] if name in SERIES else [])


def played(name: str, tmp_path: Path, seed: int) -> Outcome:
    daemons: list[LookingDaemon] = []

    def new_daemon(*given: Any, **options: Any) -> LookingDaemon:
        daemons.append(LookingDaemon(*given, **options))
        return daemons[-1]

    outcome = play(name, ranks=4, seed=seed, directory=tmp_path / "state", new_daemon=new_daemon)
    for look in (look for daemon in daemons for look in daemon.looks):
        assert_names_do_not_matter(look, playback.settings(tmp_path))
    return outcome


@pytest.mark.parametrize("name", [row(name) for name in HANGS if name != "loader"])  # the command plays it
def test_a_hang_is_found_and_the_planted_rank_named(name: str, tmp_path: Path) -> None:
    outcome = played(name, tmp_path, seed=3)
    assert outcome.right, outcome.sentence
    assert outcome.paged
    incident = incident_file.load(outcome.report)
    assert [one.rank for one in incident.verdict.named] == ([] if outcome.planted is None else [outcome.planted])
    assert {"incident.json", "report.txt", "report.html", "dumps"} <= {path.name for path in outcome.report.iterdir()}


@pytest.mark.parametrize("name", [row(name) for name in HEALTHY])
def test_a_healthy_look_alike_ends_without_a_page(name: str, tmp_path: Path) -> None:
    outcome = played(name, tmp_path, seed=3)
    assert outcome.right, outcome.sentence
    assert not outcome.paged
    assert JobState.HUNG not in outcome.states
    if name != "idle":
        assert JobState.SUSPECTED in outcome.states, "it was over before hangwatch looked: it proves nothing"


def test_the_command_exits_0_and_says_which_rank_it_named(tmp_path: Path) -> None:
    options = ["--ranks", "4", "--seed", "5", "--keep", str(tmp_path / "state")]
    done = finished(HANGWATCH, "demo", *options)
    assert (done.returncode, done.stderr) == (0, "")
    planted = SCENARIOS["loader"].planted_rank(4, 5)
    assert f"right: hangwatch paged and named rank {planted}; the demo blocked rank {planted}" in done.stdout
    report = re.search(r"^report: (.*)$", done.stdout, re.MULTILINE)
    assert Path(report[1]).read_text().lower().startswith("<!doctype html>")
    (again,) = re.findall(r"^again: (.*)$", done.stdout, re.MULTILINE)
    shown = finished(*shlex.split(again), check=True).stdout
    assert shown == Path(report[1]).with_name("report.txt").read_text()
    for command in ("explain", "merge"):  # as in the README
        answer = [HANGWATCH, command, Path(report[1]).parent, "--json"]
        told = json.loads(subprocess.run(answer, capture_output=True, timeout=60, check=True).stdout)
        assert [one["rank"] for one in told["verdict"]["named"]] == [planted], command


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    # A shell that starts the tests in the background ignores SIGINT, and all children would ignore it, too.
    command = ["env", "--default-signal=INT", HANGWATCH, "demo", "--ranks", "2", "--keep", str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        run_id = re.search(r"demo-[0-9a-f]+", demo.stdout.readline())[0]
        pids = wait_for(lambda: pids_of(run_id), "the ranks to start")
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ranks to end")


def pids_of(run_id: str) -> list[int]:
    marked = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TORCHELASTIC_RUN_ID={run_id}".encode() in (entry / "environ").read_bytes():
                marked.append(int(entry.name))
        except OSError:
            continue
    return marked


def test_the_same_seed_plants_the_same_rank_and_seeds_differ() -> None:
    lock = SCENARIOS["lock"]
    assert lock.planted_rank(8, 1) == lock.planted_rank(8, 1)
    assert {lock.planted_rank(8, seed) for seed in range(50)} == set(range(8))
    assert SCENARIOS["checkpoint"].planted_rank(8, 1) is None


def seen(*states: JobState, paged: bool = False, job: bool = True) -> Watcher:
    watcher = Watcher(None, "job", print)  # type: ignore[arg-type]
    watcher.states, watcher.paged, watcher.saw_job = list(states), paged, job
    return watcher


def verdict(kind: str, *ranks: int) -> Verdict:
    return Verdict(kind=kind, message="", named=tuple(RankId(rank=rank) for rank in ranks))


@pytest.mark.parametrize(
    ("right", "planted", "watcher", "given", "expected"),
    [
        (Answer.NAMES_PLANTED, 3, seen(JobState.HUNG, paged=True), verdict("OutsideCollective", 3), True),
        (Answer.NAMES_PLANTED, 3, seen(JobState.HUNG, paged=True), verdict("OutsideCollective", 4), False),
        (Answer.NAMES_PLANTED, 3, seen(JobState.HUNG, paged=True), verdict("OutsideCollective", 3, 4), False),
        (Answer.NAMES_PLANTED, 3, seen(JobState.HUNG, paged=True), verdict("CannotTell"), False),
        (Answer.NAMES_PLANTED, 3, seen(JobState.STALLED), verdict("OutsideCollective", 3), False),
        (Answer.NAMES_PLANTED, 3, seen(JobState.TRAINING), None, False),
        (Answer.NAMES_NOBODY, None, seen(JobState.HUNG, paged=True), verdict("AllWaiting"), True),
        (Answer.NAMES_NOBODY, None, seen(JobState.HUNG, paged=True), verdict("AllWaiting", 0), False),
        (Answer.NAMES_NOBODY, None, seen(JobState.HUNG, paged=True), verdict("CannotTell"), False),
        (Answer.NO_PAGE, None, seen(JobState.STALLED, JobState.RECOVERED), verdict("OutsideCollective", 0), True),
        (Answer.NO_PAGE, None, seen(JobState.TRAINING, paged=True), None, False),
        (Answer.NO_PAGE, None, seen(JobState.STALLED), None, False),
        (Answer.NO_JOB, None, seen(job=False), None, True),
        (Answer.NO_JOB, None, seen(job=True), None, False),
    ],
)
def test_only_the_right_answer_is_called_right(
    right: Answer, planted: int | None, watcher: Watcher, given: Verdict | None, expected: bool
) -> None:
    assert answer(right, planted, watcher, given)[0] is expected


def test_what_the_demo_leaves_alone(tmp_path: Path) -> None:
    """Do not find or dump a job of another user on this machine."""
    environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, text=True, **pipes) as stranger:
        assert stranger.stdout.readline() == "up\n"
        began = time.monotonic()
        outcome = played("idle", tmp_path, seed=0)
        assert outcome.right, outcome.sentence
        assert time.monotonic() - began < 60
        stranger.stdin.close()
