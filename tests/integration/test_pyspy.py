"""Dumps of one real process by the real py-spy, in every state, without harm to the process."""

import ctypes
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest, NodePaths
from hangwatch.capture.rounds import capture
from hangwatch.formats.pyspy_json import parse_json
from hangwatch.model import ProcessId
from hangwatch.probes.base import procfs
from hangwatch.probes.base.child import Child
from hangwatch.probes.base.child_runner import MOST_ABANDONED_OF_SHARE, AbandonedChildren
from hangwatch.probes.process import pyspy
from tests.conftest import wait_for
from tests.fake_pyspy import fake_pyspy
from tests.integration import targets
from tests.other_users import needs_root

needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")


def functions(answer: pyspy.PyspyAnswer, pid: int) -> list[str]:
    assert answer.json is not None, answer.fault
    (main,) = (thread for thread in parse_json(answer.json, pid) if thread.is_main)
    return [frame.function for frame in main.frames]


def dump(pid: int, **options: object) -> pyspy.PyspyAnswer:
    return pyspy.dump(pid, **{"deadline_seconds": 60.0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "state", "native", "function"),
    [
        (targets.SLEEPING, "S", False, "asleep"),
        (targets.SPINNING, "R", False, "spin"),
        (targets.SPINNING, "T", False, "spin"),
        (targets.IN_KERNEL, "D", False, "blocked_in_kernel"),
        (targets.IN_KERNEL, "D", True, "blocked_in_kernel"),
    ],
)
def test_any_process_is_read_unpaused(program: str, state: str, native: bool, function: str, tmp_path: Path) -> None:
    with targets.python(program, tmp_path) as pid:
        if state == "T":
            targets.stop(pid)
        targets.wait_for_state(pid, state)
        answer = dump(pid, mode=pyspy.DumpMode(native=native))
        assert functions(answer, pid) == [function, "<module>"]
        assert (answer.fault, answer.paused, answer.state_after, targets.state(pid)) == (None, False, state, state)
        assert answer.duration_seconds < 30, "a pause of a process in D would last until the deadline"


def test_hung_py_spys_of_pod_do_not_use_quota_of_another_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the limit of one pod, then dump a rank of another pod. The users of both pods have uid 0."""
    left = AbandonedChildren()
    monkeypatch.setattr(pyspy.DUMPER, "abandoned", left)
    stuck = Child(["sleep", "600"])
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        try:
            for number in range(MOST_ABANDONED_OF_SHARE):
                assert left.begin("uid 0, a stranger's", 0.0)
                left.end("uid 0, a stranger's", ProcessId(pid=-number, start_ticks=1), stuck)
            limits, reasons = config.Capture(rounds=1, dump_deadline_seconds=60.0), []
            for share in ("uid 0, mine", "uid 0, a stranger's"):
                seen = capture(
                    targets.job_of([pid], owner="uid 0", share=share), CaptureRequest(settings=limits, node="n")
                )
                fault = seen.ranks[0].rounds[0].fault
                reasons.append(fault and fault.reason)
        finally:
            assert stuck.end(10.0)
    assert reasons == [None, "TooManyDumpersStuck"]


def test_a_stack_that_changes_all_the_time_is_read_and_runs_on(tmp_path: Path) -> None:
    with targets.python(targets.CHANGING, tmp_path) as pid:
        answers = [dump(pid) for _ in range(20)]
        # One of 150 pauses comes while the interpreter builds a frame, which py-spy 0.4.3 cannot read.
        torn = [answer for answer in answers if answer.fault is not None]
        assert len(torn) <= 2, torn
        assert {(answer.fault and answer.fault.reason, answer.paused) for answer in torn} <= {("StackChanged", True)}
        assert {answer.state_after for answer in answers} <= {"R", "S"}
        assert targets.state(pid) == "R"


def test_after_a_torn_stack_the_target_is_paused_once_and_runs_on(tmp_path: Path) -> None:
    with targets.python(targets.SPINNING, tmp_path) as pid:
        answer = dump(pid, pyspy_path=_torn_at_first(tmp_path))
        assert functions(answer, pid) == ["spin", "<module>"]
        assert (answer.paused, answer.fault) == (True, None)
        assert targets.state(pid) == "R"


def test_one_thread_in_the_kernel_forbids_the_pause(tmp_path: Path) -> None:
    """Do not pause the process: py-spy would wait for all threads to stop, and one cannot stop before the deadline."""
    with targets.python(targets.THREAD_IN_KERNEL, tmp_path) as pid:
        wait_for(lambda: "D" in procfs.read_thread_states(pid), "a thread in D")
        answer = dump(pid, pyspy_path=_torn_at_first(tmp_path), deadline_seconds=60.0)
        assert (answer.paused, answer.json, targets.state(pid)) == (False, None, "S")
        assert answer.fault is not None and answer.fault.reason == "StackChanged"
        assert answer.duration_seconds < 30


def test_native_frames_when_a_person_asks(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        targets.wait_for_state(pid, "S")
        answer = dump(pid, mode=pyspy.DumpMode(native=True), deadline_seconds=60.0)
        names = functions(answer, pid)
        assert "asleep" in names and len(names) > 2
        assert answer.paused and answer.state_after in ("R", "S")


def test_variables_are_shown_only_when_a_person_asks(tmp_path: Path) -> None:
    code = "import time\ndef asleep(token):\n    ready()\n    time.sleep(600)\nasleep('hunter2')"
    with targets.python(code, tmp_path) as pid:
        targets.wait_for_state(pid, "S")
        without, shown = dump(pid), dump(pid, mode=pyspy.DumpMode(include_locals=True))
    assert b"hunter2" not in (without.json or b"")
    assert b"hunter2" in (shown.json or b"")


@needs_root
@needs_setpriv
def test_without_permission_the_missing_capability_is_named(tmp_path: Path) -> None:
    """Dump another user's process as root without CAP_SYS_PTRACE."""
    code = "import os, time\nready()\nos.setgid(65534); os.setuid(65534)\ntime.sleep(600)"
    with targets.python(code, tmp_path) as pid:
        status = Path(f"/proc/{pid}/status")
        wait_for(lambda: "Uid:\t65534" in status.read_text(), "the target to change its user")
        targets.wait_for_state(pid, "S")
        call = ["setpriv", "--bounding-set=-sys_ptrace", sys.executable, "-c", _LOOK, str(pid)]
        done = subprocess.run(call, capture_output=True, check=True, timeout=60)
        answer, counters = msgspec.json.decode(done.stdout)
        assert dump(pid).fault is None
    fault = answer["fault"]
    assert (fault["reason"], answer["paused"]) == ("PermissionDenied", False)
    assert "CAP_SYS_PTRACE" in fault["remedy"]
    assert (counters["state"], counters["io_bytes"], counters["wchan"]) == ("S", None, None)
    assert "CAP_SYS_PTRACE" in counters["faults"][0]["remedy"]


_LOOK = """
import msgspec, sys
from hangwatch.probes.base import procfs as procs
from hangwatch.probes.process import pyspy
pid = int(sys.argv[1])
sys.stdout.buffer.write(msgspec.json.encode((pyspy.dump(pid, deadline_seconds=60), procs.read_counters(pid))))
"""


def _refuse_ptrace() -> None:
    """Make ptrace(2) fail with EPERM in this process and its children, with a seccomp filter."""
    number, errno_action = {"x86_64": 101, "aarch64": 117}[os.uname().machine], 0x00050001
    program = b"".join(
        struct.pack("HBBI", *one)
        for one in (
            (0x20, 0, 0, 0),  # load the number of the system call
            (0x15, 0, 1, number),  # is it ptrace?
            (0x06, 0, 0, errno_action),  # EPERM
            (0x06, 0, 0, 0x7FFF0000),  # allow
        )
    )
    buffer = ctypes.create_string_buffer(program)
    filter_program = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filter_program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def test_seccomp_filter_on_ptrace_costs_no_stack(tmp_path: Path) -> None:
    """See by the dump with a pause, which fails, that the filter refuses ptrace(2)."""
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        targets.wait_for_state(pid, "S")
        pausing = [str(pyspy.find()), "dump", "--json", "--pid", str(pid)]
        assert subprocess.run(pausing, capture_output=True, preexec_fn=_refuse_ptrace, timeout=60).returncode == 1
        call = [sys.executable, "-c", _LOOK, str(pid)]
        done = subprocess.run(call, capture_output=True, preexec_fn=_refuse_ptrace, check=True, timeout=60)
    answer, _ = msgspec.json.decode(done.stdout, type=tuple[pyspy.PyspyAnswer, object])
    assert answer.fault is None
    assert b"asleep" in (answer.json or b"")


def test_a_py_spy_that_hangs_is_ended_at_the_deadline_and_not_retried(tmp_path: Path) -> None:
    fake = fake_pyspy(tmp_path, "exec sleep 600")
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        answer = dump(pid, pyspy_path=fake, deadline_seconds=0.5)
    assert (answer.fault.reason, answer.paused) == ("Timeout", False)
    assert 0.5 <= answer.duration_seconds < 30


STOPS_WHEN_IT_PAUSES = 'case "$*" in *nonblocking*) exit 1;; esac; kill -STOP "$4"; exit 1'
STOPS_ALWAYS = 'for last; do :; done; kill -STOP "$last"; exit 1'
NO_PAUSE_MENDS_IT = 'echo "Error: Permission denied" >&2; '


@pytest.mark.parametrize(
    ("body", "paused"), [(STOPS_WHEN_IT_PAUSES, True), (STOPS_ALWAYS, True), (STOPS_ALWAYS, False)]
)
def test_a_target_that_a_dying_py_spy_leaves_stopped_runs_on(tmp_path: Path, body: str, paused: bool) -> None:
    with targets.python(targets.SPINNING, tmp_path) as pid:
        answer = dump(pid, pyspy_path=fake_pyspy(tmp_path, body if paused else NO_PAUSE_MENDS_IT + body))
        assert (answer.paused, answer.json) == (paused, None)
        wait_until_it_works(pid)


def test_target_that_obeys_stop_after_py_spy_has_ended_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy, "_SETTLE_SECONDS", 2.0)
    late = f'(sleep 0.2; kill -STOP "$5"; touch {tmp_path}/stopped) </dev/null >/dev/null 2>&1 & exit 1'
    with targets.python(targets.SPINNING, tmp_path) as pid:
        dump(pid, pyspy_path=fake_pyspy(tmp_path, NO_PAUSE_MENDS_IT + late))
        wait_for((tmp_path / "stopped").exists, "the stop")
        wait_until_it_works(pid)


def test_a_stop_that_a_target_in_the_kernel_has_not_obeyed_yet_is_taken_back(tmp_path: Path) -> None:
    with targets.python(targets.IN_KERNEL + "ready()\nimport time\ntime.sleep(600)", tmp_path) as pid:
        targets.wait_for_state(pid, "D")
        dump(pid, pyspy_path=fake_pyspy(tmp_path, STOPS_ALWAYS))
        (tmp_path / "ready").unlink()
        (tmp_path / "fifo").write_text("")  # a writer opens the FIFO: the kernel wakes the process
        wait_for((tmp_path / "ready").exists, "the target to run on")


def test_a_stop_that_was_pending_before_is_not_taken_back(tmp_path: Path) -> None:
    with targets.python(targets.IN_KERNEL, tmp_path) as pid:
        targets.wait_for_state(pid, "D")
        os.kill(pid, signal.SIGSTOP)
        dump(pid)
        (tmp_path / "fifo").write_text("")
        targets.wait_for_state(pid, "T")


@pytest.mark.parametrize("body", [STOPS_WHEN_IT_PAUSES, STOPS_ALWAYS])
def test_what_was_stopped_before_is_not_for_hangwatch_to_continue(tmp_path: Path, body: str) -> None:
    with targets.python(targets.SPINNING, tmp_path) as pid:
        targets.stop(pid)
        answer = dump(pid, pyspy_path=fake_pyspy(tmp_path, body))
        assert (answer.paused, answer.state_after, targets.state(pid)) == (False, "T", "T")


def wait_until_it_works(pid: int) -> None:
    """Wait until the process has used CPU time, which a stopped one never does."""
    used = procfs.read_counters(pid).cpu_seconds or 0.0
    wait_for(lambda: (procfs.read_counters(pid).cpu_seconds or 0.0) > used + 0.03, "the target to run on")


def test_version_that_never_comes_costs_no_stack_and_no_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy, "_VERSION_DEADLINE_SECONDS", 3.0)
    body = f'echo "$@" >> {tmp_path}/asked; echo "[]"'
    hung = fake_pyspy(tmp_path, body, f'[ "$1" = --version ] && {{ echo >> {tmp_path}/versions; exec sleep 600; }}')
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        answers = [dump(pid, pyspy_path=hung) for _ in range(3)]
    assert [answer.json for answer in answers] == [b"[]\n"] * 3, answers[0].fault
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 and all("--nonblocking" in one for one in asked)
    assert (tmp_path / "versions").read_text() == "\n", "it is not asked again at once"


ALLOCATES = """
import os, sys
blocks = []
try:
    while True:
        blocks.append(bytearray(1 << 24))
except MemoryError:  # as Rust ends
    with open(sys.argv[1], "a") as tries:
        print(len(blocks) << 24, file=tries)
    print("memory allocation of 16777216 bytes failed", file=sys.stderr, flush=True)
    os.abort()
"""


def test_py_spy_that_needs_endless_memory_ends_and_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "allocates.py").write_text(ALLOCATES)
    program = fake_pyspy(tmp_path, f"ulimit -c 0; exec {sys.executable} {tmp_path}/allocates.py {tmp_path}/tries")
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        answer = dump(pid, pyspy_path=program, deadline_seconds=60.0)
    assert answer.fault is not None and answer.fault.reason == "TooLarge"
    (allocated,) = map(int, (tmp_path / "tries").read_text().split())
    assert allocated < pyspy.MOST_MEMORY_BYTES
    assert config.Capture().parallel * pyspy.MOST_MEMORY_BYTES <= 400 << 20


def test_rank_that_needs_endless_memory_is_tried_once_and_others_have_stacks(tmp_path: Path) -> None:
    (tmp_path / "allocates.py").write_text(ALLOCATES)
    (tmp_path / "other").mkdir()
    with (
        targets.python(targets.SLEEPING, tmp_path) as pid,
        targets.python(targets.SLEEPING, tmp_path / "other") as other,
    ):
        body = f"""case "$*" in *"--pid {pid}") ulimit -c 0; exec {sys.executable} {tmp_path}/allocates.py {tmp_path}/tries;; esac
exec {pyspy.find()} "$@\""""
        paths = NodePaths(pyspy_path=fake_pyspy(tmp_path, body))
        settings = config.Capture(rounds=3, pause_seconds=0.1, dump_deadline_seconds=60.0, round_deadline_seconds=120.0)
        taken = capture(targets.job_of_pids([pid, other]), CaptureRequest(node="here", settings=settings, paths=paths))
    assert len((tmp_path / "tries").read_text().split()) == 1
    rounds = {rank.id.pid: rank.rounds for rank in taken.ranks}
    assert {dump.fault.reason for dump in rounds[pid] if dump.fault is not None} == {"TooLarge"}
    assert all(dump.threads for dump in rounds[other]) and len(rounds[other]) == 3


_DEEP = """
import sys, threading, time
sys.setrecursionlimit(10000)
def deeper(n):
    deeper(n - 1) if n else (ready(), time.sleep(600))
threading.stack_size(256 << 20)  # some C frames for each, before Python 3.11
threading.Thread(target=deeper, args=(FRAMES,), daemon=True).start()
time.sleep(600)
"""
_MANY = """
import threading, time
threading.stack_size(64 << 10)
for _ in range(THREADS):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ready()
time.sleep(600)
"""


def test_a_process_of_many_threads_is_read_up_to_what_py_spy_can(tmp_path: Path) -> None:
    with targets.python(_MANY.replace("THREADS", "3000"), tmp_path) as pid:
        answer = pyspy.dump(pid, deadline_seconds=60.0)
    assert answer.json is not None, answer.fault
    threads = parse_json(answer.json, pid)
    assert threads[0].is_main
    assert threads[-1].name == "<2,745 threads left out>"
    with targets.python(_MANY.replace("THREADS", "4200"), tmp_path) as pid:
        fault = pyspy.dump(pid, deadline_seconds=60.0).fault
    assert (fault.reason, fault.about) == ("TooManyThreads", "tool")
    assert "4,201 threads" in fault.detail


def test_a_deep_stack_is_read_up_to_what_py_spy_can(tmp_path: Path) -> None:
    with targets.python(_DEEP.replace("FRAMES", "3900"), tmp_path) as pid:
        answer = pyspy.dump(pid, deadline_seconds=60.0)
    assert answer.json is not None, answer.fault
    deepest = max(parse_json(answer.json, pid), key=lambda thread: len(thread.frames))
    assert [frame.function for frame in deepest.frames].count("<frames left out>") == 1
    with targets.python(_DEEP.replace("FRAMES", "4200"), tmp_path) as pid:
        fault = pyspy.dump(pid, deadline_seconds=60.0).fault
    assert (fault.reason, fault.about) == ("NoInterpreter", "tool")
    assert "deeper than 4,096 frames" in fault.remedy


def test_the_installed_py_spy_is_found_and_new_enough() -> None:
    program = pyspy.find()
    assert program is not None
    assert (pyspy.version(program) or (0,)) >= pyspy.OLDEST_VERSION


@pytest.mark.parametrize(
    ("stderr", "reason", "detail"),
    [
        ("Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to call get_stack_trace for thread 7\n", "StackChanged", "Failed to get stack traces: Failed to call get_stack_trace for thread 7"),
        ("Permission Denied: Try running again with elevated permissions", "PermissionDenied", "Permission Denied: Try running again with elevated permissions"),
        ("Error: Failed to get process executable name. Check that the process is running.\n\nStack backtrace:\n 0: x", "ProcessGone", "Failed to get process executable name. Check that the process is running."),
        ("Error: something new\nStack backtrace:\n   0: anyhow", "DumpFailed", "something new"),
        ("", "DumpFailed", "py-spy ended with status 1 and no message"),
    ],
)  # fmt: skip
def test_what_py_spy_complains_of(stderr: str, reason: str, detail: str) -> None:
    fault = pyspy.explain(7, 1, stderr)
    assert (fault.subject, fault.reason, fault.detail) == ("pid 7", reason, detail)


def test_dump_takes_little_time_of_a_core(tmp_path: Path) -> None:
    def used_seconds() -> float:
        mine, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime

    with targets.python(targets.SLEEPING, tmp_path) as pid:
        before = used_seconds()
        for _ in range(10):
            assert dump(pid).fault is None
        assert used_seconds() - before < 3


def _torn_at_first(folder: Path) -> Path:
    """Return a py-spy that fails without a pause, as when the stack changes during the dump."""
    torn = 'case "$*" in *nonblocking*) echo "Error: Failed to get stack traces" >&2; exit 1;; esac; '
    return fake_pyspy(folder, f'{torn}exec {pyspy.find()} "$@"')
