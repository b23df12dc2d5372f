"""The source line next to the innermost frame of the program in `hangwatch dump`. It is read as the owner would read it."""

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture import source_lines
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest
from hangwatch.cli import node_jobs
from hangwatch.model import Frame
from hangwatch.probes.process import credentials, source_line, source_line_child
from hangwatch.stacks import activity
from tests.commands import HANGWATCH, finished
from tests.integration import targets
from tests.other_users import needs_root

SLEEP = "time.sleep(600)"
PROGRAM = f"""
import os, time
{{before}}
def rest():
    open(folder + "/ready", "w").close()
    {SLEEP}{{end}}
rest()
"""
AS_NOBODY = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"
FRAME = Frame(function="rest", file="program.py", line=6)


def running(program: Path, folder: Path, before: str = "", end: str = "", name: str | None = None) -> str:
    """Return code that runs `program`, which is compiled under `name`."""
    program.write_text(PROGRAM.format(before=before, end=end))
    return f"exec(compile(open({str(program)!r}).read(), {name or str(program)!r}, 'exec'))"


def open_for_all(path: Path) -> None:
    for folder in (path, *path.parents[:-2]):
        folder.chmod(0o777 if folder == path else 0o755)


def test_dump_shows_the_line_at_which_a_process_is(tmp_path: Path) -> None:
    dump = [*HANGWATCH, "dump"]
    with targets.python(running(tmp_path / "program.py", tmp_path), tmp_path) as pid:
        texts = [finished(*dump, f"--pid={pid}", *more).stdout for more in ([], ["--full"], ["--json"])]
        subprocess.run([*dump, f"--pid={pid}", "-o", str(tmp_path / "kept")], capture_output=True, timeout=120)
    assert f"program.py:6): {SLEEP}\n" in texts[0]
    assert f"program.py:6): {SLEEP}\n" in texts[1]
    kept = [path.read_text(errors="replace") for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert kept
    assert not any(SLEEP in text for text in (texts[2], *kept)), "a source line is stored"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("program.py", f"{SLEEP}  # {'x' * 300}"[:199] + "…"),
        ("fifo.py", ""),
        ("link.py", ""),
        ("huge.py", ""),
        ("missing.py", ""),
    ],
)
def test_only_a_regular_file_of_bounded_size_is_read(name: str, shown: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "huge.py").write_text(f"{SLEEP}\n" * (1 << 19))
    if os.geteuid() == 0:
        os.lchown((tmp_path / "link.py").symlink_to("program.py") or tmp_path / "link.py", 65534, 65534)
    else:
        (tmp_path / "link.py").symlink_to("program.py")
    code = running(tmp_path / "program.py", tmp_path, end=f"  # {'x' * 300}", name=str(tmp_path / name))
    with targets.python(code, tmp_path) as pid:
        assert source_line.read(pid, Frame(function="rest", file=name, line=6)) == shown


@needs_root
@pytest.mark.parametrize(("mode", "shown"), [(0o644, SLEEP), (0o600, "")])
def test_a_line_is_read_with_the_rights_of_the_owner(mode: int, shown: str, tmp_path: Path) -> None:
    """Do not show a line that the owner of the process may not read, even to root."""
    open_for_all(tmp_path)
    code = running(tmp_path / "program.py", tmp_path, before=AS_NOBODY)
    (tmp_path / "program.py").chmod(mode)
    with targets.python(code, tmp_path) as pid:
        assert source_line.read(pid, FRAME) == shown


@needs_root
@pytest.mark.parametrize(("owner", "shown"), [(65534, SLEEP), (0, "")])
def test_daemon_reads_only_files_of_the_owner(owner: int, shown: str, tmp_path: Path) -> None:
    open_for_all(tmp_path)
    code = running(tmp_path / "program.py", tmp_path, before=AS_NOBODY)
    os.chown(tmp_path / "program.py", owner, owner)
    with targets.python(code, tmp_path) as pid:
        rights = credentials.read_credentials(pid)
        assert rights is not None and rights.uid == 65534
        question = source_line_child.Question(pid=pid, path=str(tmp_path / "program.py"), line=6, rights=rights)
        as_daemon = ["setpriv", "--bounding-set", "-setuid,-setgid", sys.executable, "-I", "-m"]
        done = subprocess.run(
            [*as_daemon, "hangwatch.probes.process.source_line_child"],
            input=msgspec.json.encode(question),
            capture_output=True,
            timeout=60,
        )
    assert (done.stdout.decode(), done.stderr) == (shown, b"")


def test_incident_keeps_line_and_working_directory_of_a_named_rank(tmp_path: Path) -> None:
    secret = "  # token=hf_" + "x" * 34
    with targets.python(running(tmp_path / "program.py", tmp_path, end=secret), tmp_path) as pid:
        (job,), _ = node_jobs.jobs_of_pids((pid,), None, config.Jobs())
        table = activity.load(config.Activities().rules)
        look = diagnose_job(job, CaptureRequest(node="n1", settings=config.Capture(), rounds=1), table)
        rank = look.grouping.members[0].id
        named = replace(look, uid=os.geteuid(), verdict=replace(look.verdict, named=(rank,)))
        sources = [one for one in source_lines.add_evidence(named).verdict.evidence if one.kind == "source"]
        directory = Path(f"/proc/{pid}/cwd").readlink()
        assert source_lines.add_evidence(look) == look
        assert source_lines.add_evidence(replace(named, uid=None)).verdict == named.verdict
    line, folder = (source.message for source in sources)
    assert line.startswith(f"rest (program.py:6): {SLEEP}") and "xxx" not in line
    assert folder.endswith(f" is {directory}") and sources[0].ranks == (rank,)


def test_a_process_that_went_on_has_no_line(tmp_path: Path) -> None:
    with targets.python(running(tmp_path / "program.py", tmp_path), tmp_path) as pid:
        assert source_line.read(pid, FRAME) == SLEEP
        assert source_line.read(pid, Frame(function="rest", file="program.py", line=5)) == ""
    assert source_line.read(pid, FRAME) == ""


CHANGES_ITS_USER = """
import os, threading, time
def change():
    time.sleep({delay})
    {change}
{before}
threading.Thread(target=change).start()
"""


@needs_root
@pytest.mark.parametrize(
    ("before", "change", "uid"),
    [
        ("", AS_NOBODY, 65534),
        ("os.setresuid(65534, 65534, 0)", "os.setresuid(0, 0, 0)", 65534),
        ("os.setresuid(0, 65534, 0)", "os.setresuid(0, 0, 0)", 65534),
    ],
    ids=["root to 65534", "65534 to root", "root in the file system"],
)
def test_process_that_changes_its_user_lends_no_rights(before: str, change: str, uid: int, tmp_path: Path) -> None:
    """Let 17 lives of each kind change their user at a random moment of the reading. Only root may read the file."""
    chance = random.Random(41)
    for life in range(17):
        folder = tmp_path / f"{life}"
        folder.mkdir()
        open_for_all(folder)
        code = running(folder / "program.py", folder)
        (folder / "program.py").chmod(0o600)
        # The program is compiled as root, as a rank that knows the path of a file of root would write it.
        begin = CHANGES_ITS_USER.format(delay=chance.uniform(0, 0.4), change=change, before=before)
        compiled, run = code.replace("exec(compile", "program = (compile").rsplit(")", 1)[0] + ")", "exec(program)"
        with targets.python(f"{compiled}\n{begin}\nfolder = {str(folder)!r}\n{run}", folder) as pid:
            assert source_line.read(pid, FRAME, uid) == ""


@needs_root
def test_rights_that_the_process_no_longer_has_give_no_line(tmp_path: Path) -> None:
    code = running(tmp_path / "program.py", tmp_path)
    with targets.python(code, tmp_path) as pid:
        rights = credentials.read_credentials(pid)
        assert rights is not None and rights.uid == 0
        question = source_line_child.Question(pid=pid, path=str(tmp_path / "program.py"), line=6, rights=rights)
        child = [sys.executable, "-I", "-m", "hangwatch.probes.process.source_line_child"]
        for changed, shown in (
            (rights, SLEEP),
            (replace(rights, uid=65534), ""),
            (replace(rights, groups=(*rights.groups, 4)), ""),
            (replace(rights, start_ticks=rights.start_ticks + 1), ""),
        ):
            request = msgspec.json.encode(replace(question, rights=changed))
            done = subprocess.run(child, input=request, capture_output=True, timeout=60, cwd=Path.cwd())
            assert (done.stdout.decode(), done.stderr) == (shown, b"")
