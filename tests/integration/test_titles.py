"""Processes with the titles of vLLM, SGLang and Ray: four ranks in a gloo collective, and their servers.

Each start method of multiprocessing has frames of its own below the program's frames. So does a loop with Ray's
name.
"""

import json
import sys
from pathlib import Path

import psutil
import pytest

from hangwatch import words
from hangwatch.tools.explain import traces
from tests.commands import HANGWATCH, finished
from tests.conftest import wait_for
from tests.integration import targets
from tests.unit.test_explain_stacks import explained

pytestmark = pytest.mark.torch

PROGRAM = """
import ctypes, multiprocessing, os, sys


def set_title(title):
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.CDLL(None).prctl(15, title[:15].encode(), 0, 0, 0)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title.encode(), len(title))


def read_table(folder):
    open(f"{folder}/ready-2", "w").close()
    open(f"{folder}/table").read()


def run_rank(folder, title, rank):
    import torch
    import torch.distributed as dist

    set_title(title)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    if rank == 2:
        read_table(folder)
    open(f"{folder}/ready-{rank}", "w").close()
    dist.all_reduce(torch.ones(1))


def serve(folder, title):
    set_title(title)
    open(f"{folder}/ready-{title}", "w").close()
    open(f"{folder}/requests").read()


def start(folder, method, servers, ranks):
    context = multiprocessing.get_context(method)
    for title in servers:
        context.Process(target=serve, args=(folder, title)).start()
    children = [context.Process(target=run_rank, args=(folder, title, rank)) for rank, title in enumerate(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2], sys.argv[3].split(), sys.argv[4].split())
"""
KINDS = {
    "vllm": ("VLLM::EngineCore VLLM::APIServer", [f"VLLM::Worker_TP{rank}" for rank in range(4)]),
    "sglang": ("sglang::detokenizer", [f"sglang::scheduler_TP{rank}" for rank in range(4)]),
    "ray": ("ray::IDLE ray::TaskRunner.run", ["ray::WorkerDict.update"] * 4),
}


@pytest.mark.parametrize(("kind", "method"), [("vllm", "spawn"), ("sglang", "fork"), ("ray", "forkserver")])
def test_titled_rank_outside_the_collective_is_pointed_at(kind: str, method: str, tmp_path: Path) -> None:
    servers, titles = KINDS[kind]
    program = tmp_path / "serve.py"
    program.write_text(PROGRAM)
    run = f"""
import os, subprocess, sys
for name in ("table", "requests"):
    os.mkfifo(f"{{folder}}/{{name}}")
ready()
subprocess.run([sys.executable, {str(program)!r}, folder, {method!r}, {servers!r}, {" ".join(titles)!r}])
"""
    with targets.python(run, tmp_path) as parent:

        def dump_all() -> dict[int, list[str]] | None:
            pids = [child.pid for child in psutil.Process(parent).children(recursive=True)]
            texts = {pid: dump(pid) for pid in pids}
            waiting = sum(any("all_reduce" in line for line in text) for text in texts.values())
            started = sum(any("read_table" in line or " serve (" in line for line in text) for text in texts.values())
            return texts if waiting == 3 and started == 1 + len(servers.split()) else None

        texts = wait_for(dump_all, "the ranks and servers", 120.0)
        found = traces.collect((f"{pid}.txt", text) for pid, text in texts.items())
        ranks = [f"--pid={rank.id.pid}" for rank in found.ranks]
        live, of_parent, without_pid = (
            finished(*HANGWATCH, "dump", *arguments, timeout=300)
            for arguments in (ranks, [f"--pid={parent}", "--json"], [])
        )
    assert len(found.ranks) == 4, found.notes
    verdict, _ = explained(found)
    (rank,) = verdict.named or verdict.check_first
    name = titles[2].partition(".")[0]
    assert words.name_ranks([rank]).startswith(titles[2])
    assert "read_table" in verdict.message
    assert f"{name} (" in live.stdout
    (answer,) = json.loads(of_parent.stdout)["jobs"]
    pids = [found["id"]["pid"] for found in answer["capture"]["ranks"]]
    assert sorted(pids) == sorted(rank.id.pid for rank in found.ranks)
    (pointed,) = answer["verdict"]["named"] or answer["verdict"]["check_first"]
    assert pointed["pid"] == rank.pid
    if without_pid.returncode == 1:  # no job of another test runs
        assert all(f"--pid {pid}" in without_pid.stderr for pid in pids), without_pid.stderr


def dump(pid: int) -> list[str]:
    pyspy = Path(sys.executable).parent / "py-spy"
    done = finished(pyspy, "dump", "--pid", pid)
    return (done.stdout or f"Process {pid}:\n{done.stderr}").splitlines()
