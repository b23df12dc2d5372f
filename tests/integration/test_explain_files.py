"""`hangwatch explain DIR` on folders in which other users may write. The JSON that commands print."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import shutil
import string
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from msgspec.structs import replace

from hangwatch import cli, store
from hangwatch.model import Incident
from hangwatch.report import text
from hangwatch.report.html import render_files
from tests import samples
from tests.commands import HANGWATCH, Finished, finished, hangwatch, refused, write_config
from tests.conftest import DATA, wait_for
from tests.integration import targets
from tests.other_users import as_user
from tests.real_daemon import RealDaemon
from tests.schemas import DOCS

LOG = "2026-11-22 12:00:02,100 INFO backward 812\n"
SECRET = "ValueError: the password of root"


def explain(*paths: Path | str) -> Finished:
    return hangwatch("explain", *paths)


def explained(*paths: Path | str) -> str:
    """Explain files without a complaint. Return the output as one line."""
    done = explain(*paths)
    assert (done.returncode, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


def test_a_log_folder_of_torchrun() -> None:
    told = explained(DATA / "explain" / "failed")
    assert told.startswith("First to fail: rank 1 (local rank 1) at 2026-11-22 02:51:31 UTC: ValueError")


@pytest.mark.parametrize(
    ("folders", "count"),
    [(("job-7", "job-8"), 2), (("4711", "4712", "4713"), 3), (("gpu-a", "gpu-b"), 1), (("round1", "round2"), 1)],
)
def test_each_job_of_a_folder_has_a_verdict(folders: tuple[str, ...], count: int, tmp_path: Path) -> None:
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir()
        for rank in range(4):
            line = "ValueError: shard 12 is empty" if rank == number + 1 else "step 7"
            (tmp_path / folder / f"rank{rank}.log").write_text(f"2026-11-22 12:00:02 {line}\n")
    told = explained(tmp_path)
    assert told.count("Verdict ") == count
    if count > 1:
        assert [f"irst to fail: rank {number + 1} " in told for number in range(count)] == [True] * count


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_what_a_shell_of_windows_has_written_is_text(encoding: str, tmp_path: Path) -> None:
    """Read UTF-16 of PowerShell: `kubectl exec POD -- py-spy dump --pid 1 > rank0.txt`."""
    stacks = "".join(
        f'Process {pid}: python train.py\r\nThread {pid} (idle): "MainThread"\r\n    {leaf} (naïve.py:18)\r\n\r\n'
        for pid, leaf in ((7, "wait"), (8, "read_shard"))
    )
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "plain.txt").write_text(stacks, newline="")
    plain = explain(tmp_path / "plain.txt").stdout
    (tmp_path / "plain.txt").write_bytes((mark + stacks).encode(encoding))
    assert explain(tmp_path / "plain.txt").stdout == plain
    assert explain(tmp_path).stdout == plain, "found in a folder"
    assert "naïve.py" in plain and "not part of a stack dump" not in plain


def test_no_link_in_a_folder_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (secret / "attempt_0" / "1").mkdir(parents=True)
    (secret / "attempt_0" / "1" / "stderr.log").write_text(f"Traceback (most recent call last):\n{SECRET}\n")
    logs = tmp_path / "logs"
    (logs / "run" / "attempt_0" / "0").mkdir(parents=True)
    (logs / "run" / "attempt_0" / "0" / "stdout.log").write_text(LOG)
    (logs / "run" / "attempt_0" / "1").symlink_to(secret / "attempt_0" / "1")
    (logs / "rank2.log").symlink_to(secret / "attempt_0" / "1" / "stderr.log")
    os.mkfifo(logs / "rank3.log")
    told = explained(logs)
    assert "password" not in told
    assert "local rank 0 ends at 'INFO backward 812'" in told
    named = explain(logs / "rank2.log")
    assert "password" in named.stdout, "what a person names is read, link or not"


def test_what_its_reader_may_not_read_is_left_out_and_told(folder_for_all: Path) -> None:
    """Read a folder with unreadable files, such as /var/log/pods, which also has logs of other users' pods."""
    for number in range(4):
        (folder_for_all / f"rank{number}").mkdir()
        (folder_for_all / f"rank{number}" / f"rank{number}.log").write_text(LOG)
    (folder_for_all / "rank1").chmod(0)
    (folder_for_all / "rank2").chmod(0o444)  # the names in it can be read, but nothing else
    (folder_for_all / "rank3" / "rank3.log").chmod(0)
    user = as_user(4001) if os.geteuid() == 0 else []
    done = finished(*user, *HANGWATCH, "explain", folder_for_all)
    assert (done.returncode, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    assert "rank 0 ends at 'INFO backward 812'" in said
    assert f"skipped, cannot be read: {folder_for_all}/rank1; try with sudo" in said
    assert (
        f"skipped, cannot be read: {folder_for_all}/rank2/rank2.log and {folder_for_all}/rank3/rank3.log; try with sudo"
        in said
    )
    assert "rank 3" not in said, "a rank without a log is not mentioned"


def test_what_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "attempt_0" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"message": {"message": "torn')
    refused("explain", path, says=f"{path}:1: is not an error.json of torchelastic")
    long = tmp_path / "rank0.log"
    long.write_bytes(LOG.encode() * 3 + b"x" * (17 << 20))
    refused("explain", long, says=f"{long}:4: this line is longer than 16 MiB")


def test_a_progress_bar_longer_than_any_line_is_read(tmp_path: Path) -> None:
    bar = b"".join(
        b"\r%3d%%|###| %d/400000 [00:00<00:00, 123.4it/s, loss=3.14159]" % (n // 4000, n) for n in range(400_000)
    )
    (tmp_path / "rank0.log").write_bytes(bar)
    told = explained(tmp_path)
    assert len(bar) > 16 << 20
    assert "399999/400000" in told


def test_a_project_folder_is_read_for_its_dumps_and_the_rest_is_counted(tmp_path: Path) -> None:
    (tmp_path / "dump.txt").write_text((DATA / "explain" / "pgrep.txt").read_text())
    for letter in string.ascii_lowercase:
        (tmp_path / f"notes_{letter}.txt").write_text("import os\n")
        (tmp_path / f"module_{letter}.py").write_text("import os\n")
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04\x00\x00" + bytes(1 << 20))
    for name in (".venv/activate", "venv/pyvenv.cfg", "venv/bin/rank3.txt", "lib/site-packages/rank3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((DATA / "explain" / "pgrep.txt").read_text())
    done = explain(tmp_path)
    assert "26 files hold no known stack dump and no log of a known rank" in " ".join(done.stdout.split())
    assert re.search(r"skipped, not text: \S+/checkpoint\.pt\n", done.stdout)
    assert not re.search("activate|rank 3|venv|site-packages", done.stdout)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_packed_file_is_read_up_to_where_it_is_cut(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    whole = (DATA / "explain" / "pgrep.txt").read_bytes()
    packed = pack(whole)
    (tmp_path / "plain.txt").write_bytes(whole)
    (tmp_path / "packed.txt").write_bytes(packed)
    plain = explain(tmp_path / "plain.txt")
    with (tmp_path / "packed.txt").open("rb") as file:
        piped = finished(*HANGWATCH, "explain", "-", stdin=file)
    for done in (explain(tmp_path / "packed.txt"), piped):
        assert done.returncode == 0
        assert done.stdout.splitlines()[:3] == plain.stdout.splitlines()[:3]
    (tmp_path / "cut.txt").write_bytes(packed[: len(packed) * 9 // 10])
    assert "the rest cannot be read" in " ".join((done := explain(tmp_path)).stdout.split()), done.stderr


def test_packed_archive_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "dumps.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(DATA / "explain" / "pgrep.txt")
    for given in (path, tmp_path):
        assert "skipped, compressed" in explain(given).stderr


def test_zip_is_not_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "dumps.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.write(DATA / "explain" / "pgrep.txt")
    command = [*HANGWATCH, "explain", "-"]
    with path.open("rb") as file:
        piped = finished(*command, stdin=file)
    for done in (explain(path), piped):
        assert done.returncode == 2
        assert "skipped, compressed" in done.stderr and "unzip" in done.stderr
        assert "PK" not in done.stderr


def test_answer_of_hangwatch_is_recognised(tmp_path: Path) -> None:
    """An answer without stacks says how to keep them; of one with stacks, only these are read."""
    incident = samples.loader_hang()
    saved = tmp_path / "saved.txt"
    for full in (False, True):
        saved.write_text(text.render_answer(incident, full=full))
        done = explain(saved)
        assert done.returncode == 2
        assert "is an answer of hangwatch without its stacks: `hangwatch dump --stacks`" in done.stderr
        assert "not part of a stack dump" not in done.stderr
    saved.write_text(text.render_answer(incident, stacks=True))
    assert "only its stacks are read: `hangwatch dump --json`" in explained(saved)


def test_html_report_is_refused_and_its_incident_is_asked_for(tmp_path: Path) -> None:
    folder = save_incident(tmp_path, samples.loader_hang())
    done = explain(folder / "report.html")
    assert done.returncode == 2
    assert "skipped, a report: " in done.stderr and "give the incident.json beside it" in done.stderr


def test_frames_without_their_thread_ask_for_its_line(tmp_path: Path) -> None:
    (tmp_path / "part.txt").write_text("    read_table (lookup.py:41)\n    forward (plugin.py:120)\n")
    refused("explain", tmp_path / "part.txt", says="2 frames without the line above, `Thread ...")
    log = tmp_path / "rank0.log"
    log.write_text(LOG)
    assert "frames without" not in explain(log).stdout


def test_answer_in_json_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('{"schema_version": 1, "node": "a", "jobs": []}')
    told = f"is the output of `hangwatch dump --json`\n  to read it: `hangwatch explain {path}`"
    refused("report", path, says=told)


def test_an_empty_dump_of_a_recorder_and_an_empty_log_are_told(tmp_path: Path) -> None:
    for path in (DATA / "explain" / "recorder").iterdir():
        shutil.copy2(path, tmp_path)
    (tmp_path / "fr_rank_2.json").write_bytes(b"")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "stdout.log").write_bytes(b"")
    told = " ".join(explain(tmp_path).stdout.split())
    assert re.search(r"empty flight recorder dump: \S+/fr_rank_2\.json: a full disk", told)
    assert re.search(r"empty: \S+/logs/stdout\.log", told)


RECORDER = DATA / "explain" / "recorder"


def recorders(folder: Path) -> Path:
    """Copy the dumps of a real gloo job. Return their folder. Rank 2 skipped its sixth all_reduce."""
    shutil.copytree(RECORDER, folder)
    return folder


@pytest.mark.golden
def test_dumps_of_a_hung_job(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    done = explain(recorders(tmp_path / "dumps"))
    assert (done.returncode, done.stderr) == (0, "")
    golden("explain-recorder.txt", done.stdout)


def test_a_hostile_pickle_is_a_note_beside_other_dumps(tmp_path: Path) -> None:
    folder = recorders(tmp_path / "dumps")
    bomb = folder / "nccl_trace_rank_7"
    bomb.write_bytes(b"\x80\x02cos\nsystem\nX\x09\x00\x00\x00pg_config\x85R.")
    sparse = folder / "nccl_trace_rank_8"
    short = pickle.dumps({"version": "2.10", "pg_config": {}}, 2)
    with sparse.open("wb") as file:
        file.write(short[:-1])
        file.truncate(1 << 30)
    (folder / "nccl_trace_rank_9").write_bytes(gzip.compress(short)[:-8] + bytes(8))  # with a wrong checksum
    for done in (explain(folder), explain(*sorted(folder.iterdir()))):
        assert (done.returncode, done.stderr) == (0, "")
        told = " ".join(done.stdout.split())
        assert "nccl_trace_rank_7: may do more than contain values: opcode GLOBAL" in told
        assert "nccl_trace_rank_8: is larger than 64 MiB" in told
        assert "nccl_trace_rank_9: CRC check failed" in told
        assert "Rank 2 has not joined all_reduce #6" in told
    refused("explain", bomb, says=f"{bomb}: may do more than contain values")


def test_dumps_beside_stacks_and_logs_are_joined_by_rank(tmp_path: Path) -> None:
    folder = recorders(tmp_path / "dumps")
    wait = 'Thread 0x1 (idle): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:3245)\n    <module> (t.py:9)\n'
    for rank in range(4):
        own = 'Thread 0x1 (active): "MainThread"\n    prepare_batch (batch.py:7)\n    <module> (t.py:8)\n'
        text = (
            f"Process {100 + rank}: python t.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n{own if rank == 2 else wait}"
        )
        (folder / f"stack_rank{rank}.txt").write_text(text)
        (folder / f"log_rank{rank}.log").write_text(LOG)
    (folder / "weights.pkl").write_bytes(pickle.dumps([1, 2]) + bytes(8))
    told = explained(folder)
    assert "It has not joined all_reduce #6 of the default group" in told
    assert "; medium confidence Named rank 2 (pid 102)" in told
    assert "prepare_batch" in told.partition("Verdict")[0]
    assert re.search(r"skipped, not text: \S+/weights\.pkl", told)


def test_stacks_without_a_rank_are_not_joined_with_dumps(tmp_path: Path) -> None:
    folder = recorders(tmp_path / "dumps")
    text = 'Process 7: python t.py\nPython v3.11.7 (/usr/bin/python3.11)\n\nThread 0x1 (idle): "MainThread"\n    f (t.py:9)\n'
    (folder / "stack.txt").write_text(text)
    told = " ".join(explain(folder).stdout.split())
    assert told.startswith("Pid 7 is in the function f at t.py:9. ")
    assert "sequence: all_reduce #6 of the default group was open on ranks 0-1,3; rank 2 has not joined" in told


def test_a_dump_that_names_no_rank_is_told(tmp_path: Path) -> None:
    shutil.copy(RECORDER / "fr_rank_1.json", tmp_path / "recorder.json")
    refused("explain", tmp_path, says="the rank is unknown")


def save_incident(folder: Path, incident: Incident) -> Path:
    """Save an incident as `hangwatch dump -o` does."""
    return store.open_writable(folder).save(incident, render_files(incident))


def test_what_dump_left_in_a_folder_is_read_as_the_incident_that_it_is(tmp_path: Path) -> None:
    incident = samples.loader_hang()
    folder = save_incident(tmp_path / "out", incident)
    of_folder, of_incident = explain(tmp_path / "out"), explain(folder)
    assert (of_folder.returncode, of_folder.stderr) == (0, "")
    told = " ".join(of_folder.stdout.split())
    assert "read as an incident of hangwatch, with all its rounds and counters" in told
    assert of_folder.stdout.splitlines()[0] == of_incident.stdout.splitlines()[0]
    assert "report.txt" not in told and "dumps" not in told, "the same stacks are not read twice"


def test_an_incident_that_cannot_be_read_leaves_its_stacks(tmp_path: Path) -> None:
    folder = save_incident(tmp_path / "out", samples.loader_hang())
    for content in ("", "{", '{"schema_version": 999}', "[" * 100_000):
        (folder / "incident.json").write_text(content)
        done = explain(tmp_path / "out")
        assert (done.returncode, done.stderr) == (0, ""), content[:40]
        told = "".join(done.stdout.split())
        assert "theotherfilesofitsfolderarereadinstead" in told
        assert done.stdout.startswith("Rank 7 (gpu-a12")
    (folder / "incident.json").unlink()
    (folder / "incident.json").symlink_to("/etc/passwd")
    assert "root:" not in explain(tmp_path / "out").stdout


def test_incidents_of_two_jobs_are_not_mixed(tmp_path: Path) -> None:
    incident = samples.loader_hang()
    other = replace(incident.job, job_id="7", job_key="0123456789abcdef")
    save_incident(tmp_path, incident)
    save_incident(tmp_path, replace(incident, incident_id="other", job=other))
    refused("explain", tmp_path, says="these incidents are of several jobs")


def test_a_whole_store_is_refused_with_what_to_type(tmp_path: Path) -> None:
    for number in range(65):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "incident.json").write_text("{}")
    refused("explain", tmp_path, says="has 65 incidents; give the folder of one: `hangwatch incidents`")


PAGE = (DOCS / "json.md").read_text()
SCHEMA_OF = dict(re.findall(r"^\| `hangwatch (\w+) --json` .*\(([\w.]+\.schema\.json)\)", PAGE, re.MULTILINE))

VERSIONS = {"report": 4, "status": 3, "dump": 2, "explain": 2, "merge": 2}  # versions other than 1


def printed(*arguments: str, code: int = 0) -> Any:
    """Run a command with --json and check its output against the schema. Return the decoded output."""
    done = hangwatch(*arguments, "--json", LD_LIBRARY_PATH="")
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    schema = json.loads((DOCS / SCHEMA_OF[arguments[0]]).read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    assert found["schema_version"] == VERSIONS.get(arguments[0], 1)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of an incident. The configuration `tmp_path/hangwatch.toml` names its store."""
    write_config(tmp_path, tmp_path)
    yield store.open_writable(tmp_path).save(samples.loader_hang(), {})


def test_the_page_names_every_command_that_prints_json() -> None:
    context = click.Context(cli.hangwatch)
    commands = {name: cli.hangwatch.get_command(context, name) for name in cli.hangwatch.list_commands(context)}
    printing = {
        name for name, command in commands.items() if any("--json" in parameter.opts for parameter in command.params)
    }
    assert set(SCHEMA_OF) == printing


def test_explain_and_merge_print_answers(folder: Path) -> None:
    explained, merged = printed("explain", str(folder)), printed("merge", str(folder))
    assert [rank["rank"] for rank in explained["verdict"]["named"]] == [7]
    assert explained["job"] == merged["job"]
    assert merged["job"]["job_id"] == "2180718"


def test_dump_prints_an_answer_for_each_job(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        dumped = printed("dump", "--pid", str(pid))
    (job,) = dumped["jobs"]
    assert job["groups"][0]["members"][0]["pid"] == pid
    assert any("asleep" in frame for frame in job["groups"][0]["frames"])
    (rank,) = job["capture"]["ranks"]
    assert rank["rounds"][0]["threads"]


def test_report_and_incidents_print_what_is_kept(folder: Path, tmp_path: Path) -> None:
    assert printed("report", str(folder))["incident_id"] == folder.name
    listed = printed("incidents", "--config", str(tmp_path / "hangwatch.toml"))
    assert [row["folder"] for row in listed["incidents"]] == [folder.name]


def test_check_prints_its_results(tmp_path: Path) -> None:
    assert [row["check"] for row in printed("check", "memory_pressure", "--fail-on", "critical")["checks"]] == [
        "memory_pressure"
    ]


def test_status_prints_what_the_daemon_sees(tmp_path: Path) -> None:
    with RealDaemon(tmp_path / "hw", {**os.environ, "LD_LIBRARY_PATH": ""}) as daemon:
        wait_for(lambda: daemon.samples("hangwatch_check_status", check="fd_limit"), "a check")
        seen = printed("status", "--url", f"http://127.0.0.1:{daemon.port}")
    assert {check["check"] for check in seen["checks"]} >= {"fd_limit"}
