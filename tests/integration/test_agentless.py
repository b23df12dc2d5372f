"""`hangwatch dump --nodes --agentless`: nodes with only py-spy, by a local shell (`--via local`) or a real sshd."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hangwatch.tools.fleet import agentless
from hangwatch.tools.fleet.remote_run import Reply
from tests.commands import HANGWATCH, Finished, finished, first_line, spawn, write_program
from tests.conftest import wait_for
from tests.integration.test_dump_nodes import RUN_ID, VIA_HERE, job_of_four
from tests.integration.test_hostile_input import hangwatch
from tests.other_users import as_user, needs_root
from tests.ssh_nodes import needs_pdsh, needs_sshd, sshd

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
PROGRAM = """
import time
import torch.distributed as dist

def load_batch():
    time.sleep(600)

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    load_batch()
dist.barrier()
"""


def ask(*arguments: str, py_spy: str = PY_SPY, run_as: Sequence[str] = ()) -> Finished:
    """Run `hangwatch dump --agentless`. py-spy may take seconds per rank on a loaded machine."""
    how = ("--agentless", "--deadline", "90", "--remote-command", py_spy)
    return finished(*run_as, *HANGWATCH, "dump", *how, *arguments, timeout=150, cwd="/" if run_as else None)


def jobs(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)["jobs"]


def members(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [member for group in job["groups"] for member in group["members"]]


def test_ranks_are_found_and_dumped_and_their_stacks_kept(tmp_path: Path) -> None:
    with job_of_four() as pids:
        done = ask(*VIA_HERE, "--json", "--job", RUN_ID, "--raw", str(tmp_path / "raw"))
        (job,) = jobs(done)
    assert {member["pid"] for member in members(job)} == pids
    assert sorted((member["node"], member["rank"]) for member in members(job)) == [("one", rank) for rank in range(4)]
    assert (job["world_size"], job["groups"][0]["motion"]) == (4, "frozen")
    kept = sorted((tmp_path / "raw").glob("*/one.rank*.txt"))
    assert len(kept) >= 4
    for rank, path in enumerate(kept[:4]):
        assert all(line.startswith(f"[one:{rank}]") for line in path.read_text().splitlines())


FORKING = """
import os, sys
ends, kept = os.pipe()
if os.fork() == 0:
    os.close(kept)
    os.read(ends, 1)  # until its parent is gone
    os._exit(0)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_loader_worker_is_no_rank() -> None:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "loaders"}
    with spawn(sys.executable, "-c", FORKING, env=environ) as rank:
        first_line(rank)
        (job,) = jobs(ask(*VIA_HERE, "--json", "--rounds", "1", "--job", "loaders"))
    assert [member["pid"] for member in members(job)] == [rank.pid]
    assert not any("appears as pid" in note for note in job["notes"])


@pytest.mark.torch
def test_the_odd_rank_of_a_job_that_torchrun_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "--rdzv-id=agentless-odd"]  # --standalone would choose an id
    with (
        subprocess.Popen([*command, str(tmp_path / "train.py")], stderr=subprocess.DEVNULL) as job,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(job.terminate)

        def named() -> list[tuple[int, str]]:
            found = jobs(ask(*VIA_HERE, "--json", "--rounds", "1", "--job", "agentless-odd"))
            odd = [job for job in found if {member["rank"] for member in members(job)} == {0, 1, 2}]
            return [(rank["rank"], rank["node"]) for job in odd for rank in job["verdict"]["named"]]

        wait_for(lambda: named() == [(1, "one")], "all others to have joined, and the late rank to be named", 150)


def test_what_py_spy_complains_of_is_that_ranks_fault(tmp_path: Path) -> None:
    refusing = write_program(
        tmp_path / "py-spy", "[ $1 = --version ] || { echo 'Error: Failed to open process' >&2; exit 1; }"
    )
    with job_of_four() as pids:
        (job,) = jobs(ask(*VIA_HERE, "--json", "--job", RUN_ID, py_spy=str(refusing)))
    (group,) = job["groups"]
    assert ({member["pid"] for member in group["members"]}, group["ranks"]) == (pids, [0, 1, 2, 3])
    assert "Failed to open process" in group["fault"]["detail"]


def test_hostile_environment_changes_only_the_name_of_the_job(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "RANK": '../..\n"],"printed":0}',
        "WORLD_SIZE": "99999999999",
        "TORCHELASTIC_RUN_ID": 'own$(touch x)"\n=1 0 3 4 other',
    }
    program = 'import sys\nprint("up", flush=True)\nsys.stdin.read()'
    forged = ["[other:5]Process 1: python\n}\n=1 0 5 8 other", "\x1b[2J"]
    with spawn(sys.executable, "-c", program, *forged, env=environ) as owner:
        first_line(owner)
        raw = tmp_path / "raw"
        found = jobs(ask(*VIA_HERE, "--json", "--rounds", "1", "--raw", str(raw), "--job", "owntouchx"))
    (job,) = [job for job in found if owner.pid in {member["pid"] for member in members(job)}]
    assert [(member["rank"], member["node"]) for member in members(job)] == [(None, "one")]
    assert job["world_size"] is None
    (text,) = [path.read_text() for path in raw.glob(f"*/one.pid{owner.pid}.txt")]
    assert all(line.startswith("one: ") for line in text.splitlines())
    assert "\x1b" not in text


ALLOWED = """#!/bin/sh
[ "$1" = --version ] && exit
printf 'Process %s: python train.py\nPython v3.11.7 (/usr/bin/python)\n\nThread 1 (idle): "MainThread"\n    f (a.py:1)\n' $4
"""


@needs_root
def test_ranks_with_unreadable_environment_are_found_by_their_launcher(folder_for_all: Path) -> None:
    allowed = folder_for_all / "py-spy"  # replaces `sudo -n py-spy`
    allowed.write_text(ALLOWED)
    allowed.chmod(0o755)
    # A shell with the process name torchrun, which waits for its rank.
    shell = f'"{sys.executable}" -c "import time; time.sleep(600)" & echo $!; wait'
    with spawn("torchrun", "-c", shell, executable="/bin/sh", env={**os.environ, "RANK": "3"}) as launcher:
        rank = int(first_line(launcher))
        try:
            done = ask(*VIA_HERE, "--json", "--rounds", "1", py_spy=str(allowed), run_as=as_user(4001))
        finally:
            os.kill(rank, 9)
    found = jobs(done)
    (job,) = [job for job in found if rank in {member["pid"] for member in members(job)}]
    assert {member["rank"] for member in members(job)} == {None}
    assert any("environments could not be read" in note for note in job["notes"])


def test_a_node_without_py_spy_and_what_does_not_go_together() -> None:
    done = ask(*VIA_HERE, py_spy="/nonexistent/py-spy")
    assert done.returncode == 2
    assert "one: py-spy is not on its PATH: use --remote-command /path/to/py-spy" in done.stderr
    for arguments in ((), ("--nodes", "a", "-o", "b"), ("--nodes", "a", "--via", "kubectl")):
        refused = hangwatch("dump", "--agentless", *arguments)
        assert (refused.returncode, "Usage" in refused.stderr) == (2, True)


def read(printed: bytes) -> list[tuple[str, list[str]]]:
    replies = agentless.collect_replies()
    replies.take(Reply("n1", printed, 0, 1.0, 3.0))
    return replies.failed


def test_what_no_node_would_print_costs_its_node_alone() -> None:
    many = json.dumps({"began": 1, "printed": 2, "lines": [f"={pid} 0 1 1 x" for pid in range(600)]})
    assert "more than 512 processes" in read(many.encode())[0][0]
    assert "cannot be read" in read(b'{"began": "x"}')[0][0]
    assert read(b'{"began": 1, "printed": 2, "lines": ["=1 0 1 1 x", "1.0 ###", "junk", ""]}') == []


VIAS = {"ssh": "-F {config}", "pdsh": "-R ssh"}


@needs_sshd
@pytest.mark.parametrize("via", ["ssh", pytest.param("pdsh", marks=needs_pdsh)])
def test_over_a_real_sshd(via: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sshd(tmp_path / "d", ["n0", "n1"]) as config, job_of_four() as pids:
        monkeypatch.setenv("PDSH_SSH_ARGS", f"-2 -a -x -F {config} %h")
        how = ("--via", via, "--via-options", VIAS[via].format(config=config))
        (job,) = jobs(ask("--nodes", "n[0-1],unreached", *how, "--json", "--job", RUN_ID, "--rounds", "1"))
    assert {member["pid"] for member in members(job)} <= pids
    assert {member["rank"] for member in members(job)} == {0, 1, 2, 3}
    assert {member["node"] for member in members(job)} == {"n0", "n1"}
