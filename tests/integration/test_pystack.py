"""pystack's engine reads real processes that py-spy cannot read, without a pause."""

import os
import sys
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest, NodePaths
from hangwatch.capture.rounds import capture
from hangwatch.formats.pyspy_json import parse_json
from hangwatch.model import Fault, ProcessDump
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import pyspy, pystack
from hangwatch.probes.process.pyspy import PyspyAnswer
from tests.commands import spawn
from tests.conftest import wait_for
from tests.fake_pyspy import fake_pyspy
from tests.integration import targets
from tests.node_tree import job, real_rank, run
from tests.other_users import needs_root

FOREIGN = "echo 'Error: Failed to find a python interpreter in the .data section' >&2; exit 1"
UNREAD = PyspyAnswer(
    json=None, fault=Fault(subject="pid", reason="NoInterpreter", detail="none"), duration_seconds=0.0, state_after="S"
)
THREADED = """
import threading, time
def beside():
    ready()
    time.sleep(600)
threading.Thread(target=beside, daemon=True).start()
def asleep():
    time.sleep(600)
asleep()
"""
DEEP = "import time\ndef down(n):\n    down(n - 1) if n else (ready(), time.sleep(600))\nimport sys\nsys.setrecursionlimit(9999)\ndown(4200)"
NAMED = "import time\nexec(compile('def named():\\n ready()\\n time.sleep(600)\\nnamed()', folder + '/fifo', 'exec'))"


INTERPRETERS = """
import os, threading, time
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
other = interpreters.create()
code = f"import time\\ndef helper():\\n open('{folder}/started', 'w').close()\\n time.sleep(600)\\nhelper()"
threading.Thread(target=interpreters.run_string, args=(other, code), daemon=True).start()
def read_shard():
    ready()
    time.sleep(600)
while not os.path.exists(f"{folder}/started"):
    time.sleep(0.01)
read_shard()
"""
# libffi maps a page of the program for a callback, below a program that is linked statically and has a high address.
CALLBACK = """
import ctypes, os, time
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
library.mmap(0x200000, 4096, 5, 2 | 0x100000, os.open("/proc/self/exe", os.O_RDONLY), 4096)
ready()
time.sleep(600)
"""
THREADS = """
import threading, time
for _ in range(400):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ready()
time.sleep(600)
"""


def one_look(pid: int, tmp_path: Path, body: str = FOREIGN, **settings: object) -> ProcessDump:
    given = {"rounds": 1, "dump_deadline_seconds": 60.0, "round_deadline_seconds": 120.0} | settings
    limits = config.Capture(**given)  # type: ignore[arg-type]
    seen = capture(
        targets.job_of([pid]),
        CaptureRequest(settings=limits, node="n", paths=NodePaths(pyspy_path=fake_pyspy(tmp_path / "bin", body))),
    )
    return seen.ranks[0].rounds[0]


def test_a_process_that_py_spy_does_not_understand_has_its_stacks_all_the_same(tmp_path: Path) -> None:
    with targets.python(THREADED, tmp_path) as pid:
        targets.wait_for_state(pid, "S")
        dump = one_look(pid, tmp_path)
        assert (dump.fault, dump.state_after, targets.state(pid)) == (None, "S", "S")
    (main,) = (thread for thread in dump.threads if thread.is_main)
    assert [frame.function for frame in main.frames] == ["asleep", "<module>"]
    (other,) = (thread for thread in dump.threads if not thread.is_main)
    assert [(frame.function, frame.file) for frame in other.frames][:2] == [
        ("beside", "<string>"),
        ("run", "threading.py"),
    ]


@needs_root
def test_a_rank_in_a_chroot_has_its_stack(tmp_path: Path) -> None:
    """py-spy may not find the files of the process below its root. pystack does not need them."""
    (tmp_path / "empty").mkdir()
    code = f"import os, time\nos.chdir({str(tmp_path)!r})\nos.chroot('empty')\nos.mkdir('/inside')\ntime.sleep(600)"
    with targets.python(f"ready()\n{code}", tmp_path) as pid:
        wait_for((tmp_path / "empty" / "inside").exists, "the process to be in its chroot")
        targets.wait_for_state(pid, "S")
        before = pyspy.dump(pid, deadline_seconds=60.0)
        answer = pystack.dump(pid, before, deadline_seconds=60.0)
    assert answer.json is not None, answer.fault
    (thread,) = parse_json(answer.json, pid)
    assert [frame.function for frame in thread.frames] == ["<module>"]


def test_disabled_pystack_leaves_only_the_fault_of_py_spy(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        dump = one_look(pid, tmp_path, pystack=False)
    assert (dump.threads, dump.fault.reason, "pystack:" in dump.fault.detail) == ((), "NoInterpreter", False)


def test_a_stack_deeper_than_py_spy_reads(tmp_path: Path) -> None:
    with targets.python(DEEP, tmp_path) as pid:
        answer = pystack.dump(pid, UNREAD, deadline_seconds=60.0)
    assert answer.json is not None, answer.fault
    frames = parse_json(answer.json, pid)[0].frames
    assert (frames[0].function, frames[-1].function) == ("down", "<module>")
    assert [frame.function for frame in frames].count("<frames left out>") == 1


@pytest.mark.parametrize("letter", ["T", "D"])
def test_it_reads_what_is_stopped_or_in_the_kernel_and_leaves_it_so(tmp_path: Path, letter: str) -> None:
    with targets.python(targets.SLEEPING if letter == "T" else targets.IN_KERNEL, tmp_path) as pid:
        targets.stop(pid) if letter == "T" else targets.wait_for_state(pid, "D")
        answer = pystack.dump(pid, UNREAD, deadline_seconds=60.0)
        assert (answer.fault, answer.state_after, targets.state(pid)) == (None, letter, letter)


def test_no_source_file_is_opened_by_the_name_that_the_target_gives(tmp_path: Path) -> None:
    """Do not open the source file, which is a FIFO here: a process that opens a FIFO waits for a writer."""
    with targets.python(NAMED, tmp_path) as pid:
        answer = pystack.dump(pid, UNREAD, deadline_seconds=60.0)
    assert answer.json is not None, answer.fault
    assert parse_json(answer.json, pid)[0].frames[0].file == str(tmp_path / "fifo")


def test_a_mapped_file_that_is_a_link_by_now_is_not_followed(tmp_path: Path) -> None:
    mapped = tmp_path / "lib.so"
    mapped.write_bytes(b"\x7fELF" + bytes(8192))
    code = "import mmap, os, time\nkept = mmap.mmap(os.open(folder + '/lib.so', 0), 4096, prot=mmap.PROT_READ)\n"
    with targets.python(code + "ready()\ntime.sleep(600)", tmp_path) as pid:
        mapped.unlink()
        (tmp_path / "lib.so (deleted)").symlink_to("/dev/zero")
        answer = pystack.dump(pid, UNREAD, deadline_seconds=60.0)
    assert "lib.so (deleted) is not the file at this path" in answer.fault.detail


def test_a_process_that_is_no_python_keeps_py_spys_fault_with_both_complaints(tmp_path: Path) -> None:
    with spawn("sleep", "600") as child:
        answer = pystack.dump(child.pid, UNREAD, deadline_seconds=60.0)
    assert answer.fault.reason == "NoInterpreter"
    assert answer.fault.detail.startswith("none; pystack: Engine error: Could not determine python version")


def test_what_does_not_answer_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    monkeypatch.setattr(pystack, "CHILD", script)
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        answer = pystack.dump(pid, UNREAD, deadline_seconds=3.0)
    assert answer.fault.detail == "none; pystack: no stacks within 3 s"
    started = tmp_path / "pid"  # on a loaded machine it may not have started yet
    assert not started.exists() or not Path(f"/proc/{started.read_text()}").exists()
    assert pyspy.DUMPER.abandoned.count() == 0


def test_without_it_the_fault_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pystack", None)
    monkeypatch.delitem(sys.modules, "pystack")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    answer = pystack.dump(os.getpid(), UNREAD, deadline_seconds=5.0)
    assert "pip install 'pystack>=1.7,<2'" in answer.fault.remedy
    assert (answer.fault.reason, answer.fault.detail) == ("NoInterpreter", "none")


def test_main_interpreter_is_read_where_py_spy_shows_another(tmp_path: Path) -> None:
    with targets.python(INTERPRETERS, tmp_path) as pid:
        dump = one_look(pid, tmp_path, body=f'exec {pyspy.find()} "$@"')
    (main,) = (thread for thread in dump.threads if thread.is_main)
    assert main.frames[0].function == "read_shard"
    assert "helper" not in {frame.function for thread in dump.threads for frame in thread.frames}


def test_dumpers_ended_by_a_signal_are_told_without_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text("import os\nos.kill(os.getpid(), 11)")
    monkeypatch.setattr(pystack, "CHILD", script)
    with targets.python(THREADED, tmp_path) as pid:
        dump = one_look(pid, tmp_path, body="kill -SEGV $$")
    assert dump.fault is not None and dump.fault.reason == "DumperCrashed"
    assert dump.fault.detail == "py-spy was ended by signal 11 (SIGSEGV); pystack: ended by signal 11 (SIGSEGV)"
    assert "gdb" in dump.fault.remedy and "pystack" not in dump.fault.remedy
    assert dump.main.call is not None and dump.main.wchan


def test_program_mapped_below_its_first_page_is_a_known_failure_of_both(tmp_path: Path) -> None:
    with targets.python(CALLBACK, tmp_path) as pid:
        dump = one_look(pid, tmp_path, body="echo 'Error: Bad address (os error 14)' >&2; exit 1", pystack=False)
        verdict = run("dump_rights", Node(jobs=(job(real_rank(pid)),))).verdict
    assert dump.fault is not None and (dump.fault.reason, verdict.reason) == ("StaticPython", "StaticPython")
    assert "libpython.so" in dump.fault.remedy and "libpython.so" in verdict.remedy


def test_deadline_of_a_dump_grows_with_the_threads_of_the_process(tmp_path: Path) -> None:
    slow = "sleep 1; echo '[]'"
    with targets.python(THREADS, tmp_path) as pid:
        dump = one_look(pid, tmp_path, body=slow, dump_deadline_seconds=0.5, pystack=False)
        assert dump.fault is None or dump.fault.reason != "Timeout"
    (tmp_path / "few").mkdir()
    with targets.python(THREADED, tmp_path / "few") as pid:
        dump = one_look(pid, tmp_path, body=slow, dump_deadline_seconds=0.5, pystack=False)
        assert dump.fault is not None and dump.fault.reason == "Timeout"
