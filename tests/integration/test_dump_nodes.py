"""`hangwatch dump --nodes`, with real processes in place of nodes. Some fail. A "node" is a name (`--via local`)."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from hangwatch.formats import sighting
from hangwatch.model import Grouping, Incident
from hangwatch.report import as_json
from tests import samples
from tests.commands import hangwatch, rank_environ, refused, sleeping, write_program
from tests.conftest import obeys_ctrl_c, wait_for
from tests.integration import test_hostile_input as bounded

Command = Callable[..., subprocess.CompletedProcess[str]]
WORLD = 32
PRINTED = 1234567890.5
VIA_HERE = ("--nodes", "one", "--via", "local")


def incident_of(ranks: range, key: str = "") -> Incident:
    """Return an incident of these ranks. One rank of n2 is in its data loader; all other ranks wait."""
    incident = samples.all_waiting()
    groups = [samples.waiting([rank for rank in ranks if rank != 19], node="liar")]
    groups += [samples.loading([19])] if 19 in ranks else []
    job = replace(incident.job, world_size=WORLD, job_key=key or incident.job.job_key)
    return replace(incident, node="liar", job=job, grouping=Grouping(groups=tuple(groups), world_size=WORLD))


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Return a folder in which `answer NODE` prints the output of n0 to n3, which say that they are "liar"."""
    for number in range(4):
        keep(tmp_path / f"n{number}", [incident_of(range(8 * number, 8 * number + 8))])
    remote(tmp_path, "print")
    return tmp_path


def keep(path: Path, incidents: list[Incident], ahead_seconds: int = 0, *, with_stacks: bool = False) -> None:
    """Write the output of a node into a file. The clock of the node is `ahead_seconds` ahead."""
    dump = as_json.render(sighting.make_grouped_dump("liar", incidents, PRINTED, with_stacks=with_stacks))
    path.write_text(dump)
    path.with_suffix(".ahead").write_text(str(ahead_seconds))


def remote(folder: Path, script: str) -> None:
    printing = f'sed "s/{PRINTED}/$(($(date +%s) + $(cat $folder/$node.ahead)))$(date +.%N)/" $folder/$node'
    (folder / "answer").write_text(f"node=$1\nfolder={folder}\nprint() {{ {printing}; }}\n{script}\n")


def ask(
    folder: Path, *arguments: str, nodeset: str = "n[0-3]", deadline: float = 30, run: Command = hangwatch
) -> subprocess.CompletedProcess[str]:
    return run(
        "dump", "--nodes", nodeset, "--via", "local", "--deadline", str(deadline),
        "--remote-command", f"sh {folder}/answer %h", *arguments,
    )  # fmt: skip


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_verdict_over_nodes_each_under_the_name_that_was_asked(nodes: Path) -> None:
    told = answer(ask(nodes, "--json"))
    assert (told["answered"], told["unanswered"], told["failed"]) == (["n0", "n1", "n2", "n3"], [], [])
    (job,) = told["jobs"]  # type: ignore[misc]
    assert [(rank["rank"], rank["node"]) for rank in job["verdict"]["named"]] == [(19, "n2")]
    assert (job["absent"], job["world_size"]) == ([], WORLD)
    shown = ask(nodes)
    assert "ank 19 (n2" in shown.stdout
    assert "4 of 4 nodes responded, " in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_what_is_left_in_a_folder_is_merged_to_the_same(nodes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = answer(ask(nodes, "--json", "-o", str(out)))
    again = json.loads(hangwatch("merge", "--json", str(out)).stdout)
    assert [again["verdict"], again["groups"]] == [first["jobs"][0][name] for name in ("verdict", "groups")]  # type: ignore[index]
    assert (out.stat().st_mode & 0o777, (out / "nodes").stat().st_mode & 0o777) == (0o700, 0o700)
    assert len(list(out.glob("report-*.html"))) == 1


def captured(ranks: range) -> Incident:
    """Return an incident with the stack of each rank."""
    incident = incident_of(ranks)
    stack = incident.captures[-1].ranks[0]
    dumps = tuple(replace(stack, id=replace(stack.id, rank=rank, node="liar", pid=1000 + rank)) for rank in ranks)
    return replace(incident, captures=(replace(incident.captures[-1], ranks=dumps, job_key=incident.job.job_key),))


def test_raw_brings_the_stacks_of_all_ranks(nodes: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for number in range(4):
        keep(nodes / f"n{number}", [captured(range(8 * number, 8 * number + 8))], with_stacks=True)
    done = ask(nodes, "--json", "--raw", str(raw))
    (job,) = answer(done)["jobs"]  # type: ignore[misc]
    assert [rank["rank"] for rank in job["verdict"]["named"]] == [19]
    assert f"stacks: 32 files in {raw}" in done.stderr
    (folder,) = raw.iterdir()
    assert folder.name == job["job"]["job_key"]
    assert (raw.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o700, 0o700)
    assert {file.name for file in folder.iterdir()} == {f"n{rank // 8}.rank{rank}.txt" for rank in range(32)}
    text = (folder / "n2.rank19.txt").read_text()
    assert text.startswith("[n2:19]Process 1019:")
    again = json.loads(hangwatch("explain", "--json", str(folder)).stdout)
    members = [member for group in again["groups"] for member in group["members"]]
    assert sorted(member["rank"] for member in members) == list(range(32))
    refused("dump", "--nodes", "n0", "--via", "local", "--raw", str(raw), says="is not empty")


def test_names_of_raw_stacks_are_ours(nodes: Path, tmp_path: Path) -> None:
    raw, incident = tmp_path / "raw", captured(range(8))
    capture = replace(incident.captures[-1], job_key="../../etc")
    strange = samples.change_parts(incident, job_key="../../etc", captures=(capture,))
    keep(nodes / "n0", [strange], with_stacks=True)
    beyond = replace(capture.ranks[0], id=replace(capture.ranks[0].id, rank=1 << 40))
    keep(nodes / "n1", [replace(incident, captures=(replace(capture, ranks=(beyond,)),))], with_stacks=True)
    told = answer(ask(nodes, "--json", "--raw", str(raw), nodeset="n[0-1]"))
    assert [failed["nodes"] for failed in told["failed"]] == [["n1"]]  # type: ignore[attr-defined]
    (folder,) = raw.iterdir()
    assert folder.name.isalnum()
    link = tmp_path / "link"
    link.symlink_to(raw)
    refused("dump", "--nodes", "n0", "--via", "local", "--raw", str(link), says="cannot be created")


def test_a_node_that_hangs_is_unanswered_and_evidence(nodes: Path) -> None:
    remote(nodes, 'if [ "$node" = n1 ]; then exec sleep 600; fi; print')
    done = ask(nodes, "--json", deadline=10)
    told = answer(done)
    assert (told["answered"], told["unanswered"]) == (["n0", "n2", "n3"], ["n1"])
    (job,) = told["jobs"]  # type: ignore[misc]
    assert job["absent"] == [[8, 15]]
    votes = {vote["kind"]: vote["message"] for vote in job["verdict"]["evidence"]}
    assert "no response from 1 node (n1)" in votes["unanswered_nodes"]
    assert "rank 19 (n2" in job["verdict"]["message"]
    assert "8-15" in votes["unanswered"]
    assert job["verdict"]["named"] == [], "the others may wait for the node that did not respond"
    assert "no response within 10 s, or unreachable: n1" in done.stderr
    assert re.search(r"gave up on 1, \d+ s", done.stderr), done.stderr


def test_missing_program_to_reach_nodes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    refused(
        "dump", "--nodes", "a,b", says="ssh is not on the PATH of this machine\n  install it (Debian: openssh-client)"
    )


def test_garbage_a_gigabyte_and_a_missing_command_cost_their_node_alone(nodes: Path) -> None:
    remote(
        nodes,
        """case $node in
n4) echo '{"node": [1'; exit 0;;
n5) head -c 1000000000 /dev/zero;;
n6) yes '{' | head -c 100000000;;
n7) exec /nonexistent/hangwatch;;
n8) echo '{"node":"n8","schema_version":99,"hangwatch_version":"9.0","jobs":[]}';;
n9) echo >&2 cannot open the driver; exit 70;;
*) echo Welcome to $node; echo >&2 module load failed; print;;
esac""",
    )
    done = ask(nodes, "--json", nodeset="n[0-9]", run=bounded.hangwatch)
    told = answer(done)
    assert told["answered"] == ["n0", "n1", "n2", "n3"]
    reasons = {node: failed["reason"] for failed in told["failed"] for node in failed["nodes"]}  # type: ignore[attr-defined]
    assert set(reasons) == {f"n{number}" for number in range(4, 10)}
    for node, said in {
        "n4": "truncated",
        "n5": "more than 32 MiB",
        "n6": "more than 32 MiB",
        "n7": "--remote-command",
        "n8": "hangwatch 9.0 in form 99",
        "n9": "exit code 70",
    }.items():
        assert said in reasons[node]
    assert done.stderr.count("module load failed") == 1
    assert "n[0-3]: module load failed" in done.stderr
    assert "n9: cannot open the driver" in done.stderr


def test_dump_with_only_errors_from_nodes_exits_with_2(nodes: Path) -> None:
    done = hangwatch("dump", "--nodes", "n[0-1]", "--via", "local", "--remote-command", "/nonexistent/hangwatch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "n[0-1]: hangwatch is not on its PATH: use --remote-command" in done.stderr


def test_nodes_without_a_job(nodes: Path) -> None:
    keep(nodes / "n1", [])
    assert answer(ask(nodes, "--json"))["without_job"] == ["n1"]
    remote(nodes, "node=n1; print; exit 1")
    done = ask(nodes)
    assert done.returncode == 1
    assert "no training job found on n[0-3]" in done.stderr


def test_several_jobs_have_a_verdict_each(nodes: Path) -> None:
    keep(nodes / "n1", [incident_of(range(8), key="0123456789abcdef")])
    told = answer(ask(nodes, "--json"))
    assert len(told["jobs"]) == 2  # type: ignore[arg-type]
    (job,) = answer(ask(nodes, "--json", "--job", "0123456789abcdef"))["jobs"]  # type: ignore[misc]
    assert job["job"]["job_key"] == "0123456789abcdef"
    assert "key 0123456789abcdef) on n1" in ask(nodes).stdout


def test_a_clock_that_is_ahead_is_said(nodes: Path) -> None:
    keep(nodes / "n1", [incident_of(range(8, 16))], ahead_seconds=3600)
    (job,) = answer(ask(nodes, "--json"))["jobs"]  # type: ignore[misc]
    (vote,) = [vote for vote in job["verdict"]["evidence"] if vote["kind"] == "clocks"]
    assert re.search(r"n1 is at least (59 min \d\d s|1 h 00 min) ahead of it", vote["message"])


def test_names_that_are_no_hosts_are_refused(nodes: Path) -> None:
    for nodeset, says in {
        "-oProxyCommand=x": "is not a host name",
        "n[0-99999999999]": "more than 65,536 nodes",
        "n[0-70000]": "more than 65,536 nodes",
        "n[": "a bracket is never closed",
        "n[1-": "--nodes n[1-: a bracket is never closed",
        "n1-3]": "a bracket is never opened",
        "a/b": "is not a host name",
    }.items():
        refused("dump", f"--nodes={nodeset}", "--via", "local", says=says)


def test_options_that_do_not_go_together() -> None:
    for arguments in (
        ("--nodes", "a", "--pid", "1"),
        ("--via", "ssh"),
        ("--nodes", "a", "--via", "srun"),
        ("--selector", "a"),
        ("--raw", "a"),
        ("--nodes=",),
        ("--jobid= ",),
    ):
        done = hangwatch("dump", *arguments)
        assert (done.returncode, "Usage" in done.stderr) == (2, True)


@pytest.mark.parametrize("arguments", [("dump", "--nodes", ""), ("merge", ""), ("dump", "--nodes", "a", "--raw", "")])
def test_a_variable_that_is_not_set_is_no_current_folder(arguments: tuple[str, ...]) -> None:
    refused(*arguments, says="an argument is empty: is a shell variable not set?")


def running(folder: Path) -> list[psutil.Process]:
    """Return the processes that still request data from the nodes of `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()) and process.pid != os.getpid():
                found.append(process)
    return found


def end_while_nodes_answer(
    nodes: Path, ending: signal.Signals, *options: str, count: int, argument: str = ""
) -> int | None:
    """End `hangwatch dump` while `count` nodes answer. All that it started must end, too. Return its status."""
    command = [sys.executable, "-m", "hangwatch", "dump", *options, "--deadline", "600"]
    with subprocess.Popen(
        [*command, "--remote-command", f"sh {nodes}/answer {argument}".rstrip()],
        stderr=subprocess.PIPE,
        preexec_fn=obeys_ctrl_c,
    ) as asking:
        wait_for(lambda: len(list(nodes.glob("up-*"))) == count, "the nodes to run")
        assert len(running(nodes)) > count
        asking.send_signal(ending)
        asking.wait(60)
    wait_for(lambda: not running(nodes), "an end of what was started")
    return asking.returncode


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_we_are_ended_so_is_what_runs_on_the_nodes(nodes: Path, ending: signal.Signals) -> None:
    remote(nodes, 'echo up >"$folder/up-$node"; exec sh -c "sleep 600; true" "$folder"')
    status = end_while_nodes_answer(nodes, ending, "--nodes", "n[0-3]", "--via", "local", count=4, argument="%h")
    assert status == {signal.SIGINT: 130}.get(ending, -ending)


@pytest.mark.parametrize(("program", "ending"), [("sh", signal.SIGINT), ("timeout", signal.SIGTERM)])
def test_command_below_a_slow_program_ends_with_hangwatch(
    nodes: Path, tmp_path: Path, program: str, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow down a program: one second passes after each process that it starts, as on a busy machine."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    (tmp_path / "bin").mkdir()
    slowly = f"{strace} -D -qq -o /dev/null --inject=clone,clone3,fork,vfork:delay_exit=1000000"
    slow = write_program(tmp_path / "bin" / program, f'exec {slowly} {shutil.which(program)} "$@"')
    remote(nodes, 'echo up >"$folder/up-$node"; exec sh -c "sleep 600; true" "$folder"')
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    end_while_nodes_answer(nodes, ending, "--nodes", "n[0-3]", "--via", "local", count=4, argument="%h")


RUN_ID, NAME = f"nodes-{os.getpid()}", f"llama-{os.getpid()}"  # other workers run such jobs, too


@contextlib.contextmanager
def job_of_four() -> Iterator[set[int]]:
    """Start a job of four sleeping ranks. Yield the pids of the ranks."""
    environs = [rank_environ(RUN_ID, rank, size=4, SLURM_JOB_NAME=NAME) for rank in range(4)]
    with contextlib.ExitStack() as stack:
        yield {stack.enter_context(sleeping(**environ)) for environ in environs}


@pytest.mark.parametrize("wanted", ["id", "name"], ids=["its id", "the name that a page prints"])
def test_the_real_command_is_what_answers(tmp_path: Path, wanted: str) -> None:
    with job_of_four() as pids:
        done = hangwatch(
            "dump", "--nodes", "one", "--via", "local", "--rounds", "1", "--json",
            "--job", RUN_ID if wanted == "id" else NAME,
            "--remote-command", f"{sys.executable} -m hangwatch", "--deadline", "150", "--raw", str(tmp_path / "raw"),
        )  # fmt: skip
    told = answer(done)
    (job,) = told["jobs"]  # type: ignore[misc]
    members = [member for group in job["groups"] for member in group["members"]]
    assert {(member["pid"], member["node"]) for member in members} == {(pid, "one") for pid in pids}
    files = sorted(file.name for file in (tmp_path / "raw").glob("*/*"))
    assert files == [f"one.rank{rank}.txt" for rank in range(4)]


SRUN = """#!/bin/sh
# a task for each node, its lines labelled with its number; all read our standard input
for word; do case $word in --nodelist=*) nodes=$(echo "${word#*=}" | tr , ' ');; esac; done
echo "$*" >FOLDER/srun-arguments
while [ "$1" != sh ]; do shift; done
exec 4<&0
number=0
for node in $nodes; do
  { SLURMD_NODENAME=$node "$@" <&4 | sed -u "s/^/$number: /"; } &
  number=$((number + 1))
done
wait
"""
KUBECTL = """#!/bin/sh
echo "$*" >>FOLDER/kubectl-arguments
while [ "$1" != get ] && [ "$1" != exec ]; do shift; done
if [ "$1" = get ]; then case "$*" in *job-name=*) cat FOLDER/job.json;; *) cat FOLDER/pods.json;; esac; exit; fi
pod=$5
while [ "$1" != -- ]; do shift; done
shift
POD=$pod exec "$@"
"""


@pytest.fixture
def stand_ins(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put fake srun, squeue and kubectl for these tests first in PATH. Return the folder of the nodes."""
    (nodes / "bin").mkdir()
    squeue = '#!/bin/sh\n[ "$*" = "--noheader --jobs=4711 --format=%i|%T|%N" ] && echo "4711|RUNNING|n[0-3]"\n'
    for name, script in {"srun": SRUN, "kubectl": KUBECTL, "squeue": squeue}.items():
        (nodes / "bin" / name).write_text(script.replace("FOLDER", str(nodes)))
        (nodes / "bin" / name).chmod(0o755)
    pods = [
        {"metadata": {"name": f"hw-n{number}", "namespace": "gpu"}, "spec": {"nodeName": f"n{number}"}}
        for number in range(4)
    ]
    (nodes / "pods.json").write_text(json.dumps({"kind": "List", "items": pods}))
    monkeypatch.setenv("PATH", f"{nodes}/bin:{os.environ['PATH']}")
    return nodes


def names_rank_19(done: subprocess.CompletedProcess[str]) -> bool:
    (job,) = answer(done)["jobs"]  # type: ignore[misc]
    return [(rank["rank"], rank["node"]) for rank in job["verdict"]["named"]] == [(19, "n2")]


def test_one_step_of_slurm_asks_all_nodes_of_a_job(stand_ins: Path) -> None:
    remote(stand_ins, 'node=$SLURMD_NODENAME; test -z "$SLURM_LIAR" && print')
    command = ("--remote-command", f"sh {stand_ins}/answer", "--json")
    assert names_rank_19(hangwatch("dump", "--jobid", "4711", "--via", "srun", *command))
    told = (stand_ins / "srun-arguments").read_text().split()
    for option in ("--overlap", "--jobid=4711", "--gres=gpu:0", "--ntasks-per-node=1", "--nodelist=n0,n1,n2,n3"):
        assert option in told
    refused("dump", "--jobid", "4712", "--via", "srun", says="squeue")


def test_what_squeue_complains_of_is_told_with_what_to_type(stand_ins: Path) -> None:
    (stand_ins / "bin" / "squeue").write_text("#!/bin/sh\necho 'error: Invalid job id: abc' >&2; exit 1\n")
    refused("dump", "--jobid", "abc", "--via", "srun", says="squeue --me")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["4711|SUSPENDED|n[0-3]"], "scontrol resume 4711"),
        (["4711_1|RUNNING|n[0-1]", "4711_2|RUNNING|n[2-3]"], "give one of them (4711_1, 4711_2)"),
        (["4711+0|RUNNING|n[0-1]", "4711+1|RUNNING|n[2-3]"], "heterogeneous job"),
        (["4711|PENDING|"], "lists no nodes of this job (PENDING)"),
    ],
)
def test_slurm_job_in_which_no_step_starts_is_refused(stand_ins: Path, rows: list[str], says: str) -> None:
    (stand_ins / "bin" / "squeue").write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    refused("dump", "--jobid", "4711", "--via", "srun", says=says)


def test_array_with_one_running_job_is_that_job(stand_ins: Path) -> None:
    squeue = "#!/bin/sh\necho '4711_2|RUNNING|n[0-3]'\necho '4711_[3-9%1]|PENDING|'\n"
    (stand_ins / "bin" / "squeue").write_text(squeue)
    remote(stand_ins, "node=$SLURMD_NODENAME; print")
    command = ("--remote-command", f"sh {stand_ins}/answer", "--json")
    assert names_rank_19(hangwatch("dump", "--jobid", "4711", "--via", "srun", *command))


def test_two_tasks_that_give_one_name_have_one_voice(stand_ins: Path) -> None:
    srun = stand_ins / "bin" / "srun"
    srun.write_text(srun.read_text().replace("SLURMD_NODENAME=$node ", "SLURMD_NODENAME=$(echo $node | tr 3 1) "))
    remote(stand_ins, "node=$SLURMD_NODENAME; print")
    done = hangwatch("dump", "--jobid", "4711", "--via", "srun", "--remote-command", f"sh {stand_ins}/answer", "--json")
    told = answer(done)
    assert told["answered"] == ["n0", "n1", "n2"]
    assert [failed["nodes"] for failed in told["failed"]] == [["n3"]]  # type: ignore[attr-defined]


def test_kubectl_runs_it_in_the_pod_of_each_node(stand_ins: Path) -> None:
    remote(stand_ins, "node=${POD#hw-}; print")
    command = ("--via", "kubectl", "--via-options", "--context=big", "--remote-command", f"sh {stand_ins}/answer")
    assert names_rank_19(hangwatch("dump", "--nodes", "n[0-3]", *command, "--json"))
    told = (stand_ins / "kubectl-arguments").read_text()
    assert "--context=big get pods --all-namespaces --selector app.kubernetes.io/name=hangwatch" in told
    assert "--context=big exec -i --namespace gpu hw-n2 --container hangwatch -- sh -c" in told
    refused("dump", "--nodes", "n[0-9]", *command, says="no pod of hangwatch runs on n[4-9]")
    pods = [
        {
            "metadata": {"name": f"train-{number}", "namespace": "team"},
            "spec": {"nodeName": node},
            "status": {"phase": phase},
        }
        for number, (node, phase) in enumerate(
            [*((f"n{node}", "Running") for node in (0, 1, 2, 2, 3)), ("n9", "Failed"), ("", "Pending")]
        )
    ]
    (stand_ins / "job.json").write_text(json.dumps({"kind": "List", "items": pods}))
    of_job = ("--selector", "job-name=train", "-n", "team")
    assert names_rank_19(hangwatch("dump", *of_job, *command, "--json"))
    told = (stand_ins / "kubectl-arguments").read_text()
    assert "--context=big get pods --namespace=team --selector=job-name=train --output json" in told
    (stand_ins / "job.json").write_text('{"items": []}')
    refused("dump", *of_job, *command, says="no pod with this label has a node")
    (stand_ins / "job.json").write_text('{"items": [{"metadata": {"name": "a"}, "spec": {"nodeName": "-oX"}}]}')
    refused("dump", *of_job, *command, says="is not a host name")
    (stand_ins / "pods.json").write_text("{")
    refused("dump", "--nodes", "n0", *command, says="its list of pods cannot be read")
