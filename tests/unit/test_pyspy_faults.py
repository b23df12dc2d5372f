"""Faults of py-spy, a shell script here: command line, permission to pause, texts for users, on a fake /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hangwatch.model import Fault
from hangwatch.probes.base import child_runner
from hangwatch.probes.process import pyspy
from tests.conftest import wait_for
from tests.fake_pyspy import fake_pyspy
from tests.proc_tree import lay_out

TARGET = 5_000_000  # above the kernel's PID_MAX_LIMIT: our signals reach no process
STACKS = 'echo "[]"'
NO_INTERPRETER = "echo 'Error: Failed to find a python interpreter' >&2; exit 1"
TORN = "echo 'Error: Failed to get stack traces' >&2; exit 1"


class Target:
    """A process in a fake /proc, and a fake py-spy that logs each call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.proc = folder, folder / "proc"
        self.shows("S")

    def shows(self, state: str, *, threads: str = "S", count: int = 1, uid: int = 1004) -> None:
        lay_out(f"{TARGET} (python3) {state} parent=1 start=1000", self.proc)
        process = self.proc / str(TARGET)
        (process / "status").write_text(f"Name:\tpython3\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nThreads:\t{count}\n")
        for number, letter in enumerate(threads):
            (process / f"task/{TARGET + number}").mkdir(parents=True)
            stat = (process / "stat").read_text().replace(f") {state} ", f") {letter} ")
            (process / f"task/{TARGET + number}/stat").write_text(stat)

    def pyspy(self, body: str, paused: str | None = None) -> Path:
        """Write a py-spy that runs the shell script `body`, or `paused` if it may pause the target."""
        other = "" if paused is None else f'case "$*" in *--nonblocking*) ;; *) {paused}; exit;; esac\n'
        return fake_pyspy(self.folder, f'echo "$*" >> {self.folder}/calls\n{other}{body}')

    def dump(self, program: Path, **options: object) -> pyspy.PyspyAnswer:
        given = {"deadline_seconds": 20.0, "pyspy_path": program, "proc_root": self.proc, **options}
        return pyspy.dump(TARGET, **given)  # type: ignore[arg-type]

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path)


@pytest.fixture
def silent_stdin() -> Iterator[None]:
    """Give this process a standard input without data, like a terminal or the pipe of a service manager."""
    old = os.dup(0)
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    yield
    os.dup2(old, 0)
    for descriptor in (old, reading, writing):
        os.close(descriptor)


def fault_of(answer: pyspy.PyspyAnswer) -> Fault:
    assert (answer.json, answer.fault is None) == (None, False)
    assert answer.fault.subject == f"pid {TARGET}"
    return answer.fault


def fault_parts(fault: Fault) -> tuple[str, str, str, str]:
    return fault.reason, fault.about, fault.detail, fault.remedy


# --- its command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, "dump --json --nonblocking"),
        ({"include_locals": True}, "dump --json --nonblocking --locals"),
        ({"native": True}, "dump --json --native"),
    ],
)
def test_only_native_frames_pause_the_target_at_once(target: Target, options: dict[str, bool], arguments: str) -> None:
    answer = target.dump(target.pyspy(STACKS), mode=pyspy.DumpMode(**options))
    assert target.calls == [f"{arguments} --pid {TARGET}"]
    assert (answer.json, answer.fault, answer.paused, answer.state_after) == (b"[]\n", None, "native" in options, "S")


def test_pyspy_gets_a_minimal_environment(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give py-spy no variables of the daemon: they may hold tokens."""
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("PATH", f"/nowhere:{os.environ['PATH']}")
    target.dump(target.pyspy(f"env > {target.folder}/environ; {STACKS}"))
    told = dict(line.split("=", 1) for line in (target.folder / "environ").read_text().splitlines())
    assert {**told, "PWD": "", "OLDPWD": "", "SHLVL": "", "_": ""} == {
        "PATH": os.environ["PATH"],
        "RUST_BACKTRACE": "0",  # omits a hundred lines
        **dict.fromkeys(("PWD", "OLDPWD", "SHLVL", "_"), ""),
    }


def test_pyspy_runs_without_path(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    program = target.pyspy(f"/usr/bin/env > {target.folder}/environ; {STACKS}")
    target.dump(program)
    assert "RUST_BACKTRACE=0\n" in (target.folder / "environ").read_text()


def test_pyspy_has_no_standard_input(target: Target, silent_stdin: None) -> None:
    program = fake_pyspy(target.folder, f"read line; {STACKS}", f'[ "$1" = --version ] && read line; {pyspy_says()}')
    assert target.dump(program).fault is None


def pyspy_says(words: str = "py-spy 0.4.9", status: int = 0) -> str:
    return f'[ "$1" = --version ] && {{ echo "{words}"; exit {status}; }}'


# --- its path and version --------------------------------------------------------------------------------------------


def test_pyspy_beside_the_interpreter_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    elsewhere = fake_pyspy(tmp_path / "bin", STACKS)
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    assert pyspy.find() == elsewhere
    beside = fake_pyspy(tmp_path, STACKS)
    assert pyspy.find() == beside
    beside.unlink()
    beside.mkdir()
    assert pyspy.find() == elsewhere


def test_missing_pyspy_has_the_install_command_as_remedy(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(target.folder / "python"))
    monkeypatch.setenv("PATH", str(target.folder / "bin"))
    answer = pyspy.dump(TARGET, deadline_seconds=5.0, proc_root=target.proc)
    fault = fault_of(answer)
    assert (fault.reason, fault.about, fault.detail) == ("NoPyspy", "tool", "py-spy was not found")
    assert "pip install 'py-spy>=0.4.1'" in fault.remedy
    assert (answer.duration_seconds, answer.paused, answer.state_after) == (0.0, False, "S")
    assert pyspy.find() is None


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("py-spy 0.4.9", (0, 4, 9)),
        ("py-spy 0.4", (0, 4, 0)),
        ("py-spy 1.12.30-rc1", (1, 12, 30)),
        ("py-spy four", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("status", [0, 1])
def test_version_output_is_parsed(tmp_path: Path, printed: str, number: tuple[int, ...] | None, status: int) -> None:
    assert pyspy.version(fake_pyspy(tmp_path, STACKS, pyspy_says(printed, status))) == number


def test_version_of_a_broken_pyspy_is_unknown_or_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy, "_VERSION_DEADLINE_SECONDS", 0.2)
    assert pyspy.version(tmp_path / "nowhere") is None
    assert pyspy.version(fake_pyspy(tmp_path, STACKS, "exec sleep 600")) == pyspy.SILENT


def test_version_is_asked_once_unless_unknown(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = fake_pyspy(tmp_path, STACKS, f"echo >> {asked}; {pyspy_says('not yet')}")
    assert [pyspy.version(program), pyspy.version(program)] == [None, None]
    program = fake_pyspy(tmp_path, STACKS, f"echo >> {asked}; {pyspy_says()}")
    assert [pyspy.version(program), pyspy.version(program)] == [(0, 4, 9)] * 2
    assert asked.read_text() == "\n" * 3


def test_parallel_dumps_ask_for_the_version_once(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = fake_pyspy(tmp_path, STACKS, f"echo >> {asked}; sleep 0.2; {pyspy_says()}")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(pyspy.version, [program] * 4)) == [(0, 4, 9)] * 4
    assert asked.read_text() == "\n"


def test_parallel_dumps_wait_once_for_a_silent_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy, "_VERSION_DEADLINE_SECONDS", 1.0)
    asked = tmp_path / "asked"
    program = fake_pyspy(tmp_path, STACKS, f"echo >> {asked}; exec sleep 600")
    began = threading.Barrier(4)

    def version() -> tuple[int, ...] | None:
        began.wait()
        return pyspy.version(program)

    with ThreadPoolExecutor(4) as pool:
        assert [one.result() for one in [pool.submit(version) for _ in range(4)]] == [pyspy.SILENT] * 4
    assert pyspy.version(program) == pyspy.SILENT
    assert asked.read_text() == "\n", "it is asked again after a minute"
    monkeypatch.setitem(pyspy._SILENT_UNTIL, program, 0.0)
    assert pyspy.version(program) == pyspy.SILENT
    assert asked.read_text() == "\n" * 2


@pytest.mark.parametrize(("printed", "words"), [("py-spy 0.3.14", "0.3.14"), ("what?", "unknown")])
def test_old_pyspy_is_refused_with_a_remedy(target: Target, printed: str, words: str) -> None:
    program = fake_pyspy(target.folder, f"touch {target.folder}/dumped; {STACKS}", pyspy_says(printed))
    fault = fault_of(target.dump(program))
    assert (fault.reason, fault.about) == ("PyspyTooOld", "tool")
    assert fault.detail == f"{program} has version {words}; versions before 0.4 can leave a rank stopped for ever"
    assert "pip install 'py-spy>=0.4.1'" in fault.remedy
    assert not (target.folder / "dumped").exists()


def test_pyspy_removed_after_its_version_is_a_fault(target: Target) -> None:
    program = target.pyspy(STACKS)
    assert pyspy.version(program) == (0, 4, 9)
    program.unlink()
    answer = target.dump(program)
    assert fault_parts(fault_of(answer)) == ("CannotStart", "tool", f"{program}: No such file or directory", "")


# --- second attempts, and pauses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", "ZX")
def test_ended_process_is_not_dumped(target: Target, letter: str) -> None:
    target.shows(letter)
    answer = target.dump(target.pyspy(STACKS))
    assert fault_parts(fault_of(answer)) == ("ProcessGone", "target", "the process has ended", "")
    assert (answer.duration_seconds, answer.state_after, target.calls) == (0.0, letter, [])


def test_process_ending_during_a_dump_has_no_state_after(target: Target) -> None:
    answer = target.dump(target.pyspy(f"rm -r {target.proc}/{TARGET}; {STACKS}"))
    assert (answer.json, answer.state_after) == (b"[]\n", None)


@pytest.mark.parametrize(
    ("complaint", "is_passing"),
    [
        ("Error: Failed to get stack traces", True),
        ("Error: an unknown error", True),
        ("", True),
        ("Error: Permission denied", False),
        ("Error: Failed to find python version from target process", False),
        ("Error: timed out", False),
        ("Error: Failed to suspend process", False),
    ],
)
def test_second_attempt_is_made_only_for_passing_faults(target: Target, complaint: str, is_passing: bool) -> None:
    answer = target.dump(target.pyspy(f"echo '{complaint}' >&2; exit 1", paused=STACKS))
    assert (answer.fault is None, answer.paused, len(target.calls)) == (is_passing, is_passing, 1 + is_passing)


@pytest.mark.parametrize("letter", "RSDTtZXI")
def test_blocked_thread_forbids_the_pause(target: Target, letter: str) -> None:
    target.shows("S", threads=f"SS{letter}S")
    answer = target.dump(target.pyspy(TORN, paused=STACKS))
    assert answer.paused == (letter in "RS")
    assert target.dump(target.pyspy(STACKS), mode=pyspy.DumpMode(native=True)).paused == (letter in "RS")


def test_process_without_known_threads_is_not_paused(target: Target) -> None:
    target.shows("S", threads="")
    assert not target.dump(target.pyspy(TORN, paused=STACKS)).paused


def test_paused_attempt_is_made_once(target: Target) -> None:
    answer = target.dump(target.pyspy(TORN))
    assert (fault_of(answer).reason, answer.paused, len(target.calls)) == ("StackChanged", True, 2)
    target.dump(target.pyspy(TORN), mode=pyspy.DumpMode(native=True))
    assert len(target.calls) == 3


def test_paused_attempt_needs_permission(target: Target) -> None:
    answer = target.dump(target.pyspy(TORN, paused=STACKS), mode=pyspy.DumpMode(may_pause=False))
    assert (fault_of(answer).reason, answer.paused, len(target.calls)) == ("StackChanged", False, 1)
    assert not target.dump(target.pyspy(STACKS), mode=pyspy.DumpMode(may_pause=False, native=True)).paused
    assert "--nonblocking" in target.calls[-1]


def test_paused_attempt_has_its_own_deadline(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy, "BLOCKING_DEADLINE_SECONDS", 0.4)
    fault = fault_of(target.dump(target.pyspy(TORN, paused="exec sleep 600")))
    assert fault_parts(fault) == ("Timeout", "target", "no stacks within 0.4 s", "")


def test_paused_attempt_is_bounded_by_the_dumps_deadline(target: Target) -> None:
    fault = fault_of(target.dump(target.pyspy(TORN, paused="exec sleep 600"), deadline_seconds=1.0))
    assert fault.detail == "no stacks within 1 s"


def test_interpreter_missed_once_is_found_by_a_retry(target: Target) -> None:
    body = f"[ $(wc -l < {target.folder}/calls) -ge 3 ] && {STACKS} && exit; {NO_INTERPRETER}"
    answer = target.dump(target.pyspy(body))
    assert (answer.json, answer.paused, len(target.calls)) == (b"[]\n", False, 3)


def test_interpreter_missed_always_is_tried_five_times(target: Target) -> None:
    fault = fault_of(target.dump(target.pyspy(NO_INTERPRETER)))
    assert (fault.reason, fault.about, len(target.calls)) == ("NoInterpreter", "tool", 5)


@pytest.mark.parametrize("count", [4096, 4097])
def test_process_with_too_many_threads_is_tried_once(target: Target, count: int) -> None:
    target.shows("S", count=count)
    fault = fault_of(target.dump(target.pyspy(NO_INTERPRETER, paused=STACKS)))
    if count == 4096:
        assert (fault.reason, len(target.calls)) == ("NoInterpreter", 5)
    else:
        detail = "it has 4,097 threads; py-spy reads at most 4,096"
        assert (*fault_parts(fault), len(target.calls)) == ("TooManyThreads", "tool", detail, "", 1)


def test_all_attempts_together_have_one_deadline(target: Target) -> None:
    body = f"[ -e {target.folder}/again ] && exec sleep 600; touch {target.folder}/again; sleep 3; {NO_INTERPRETER}"
    answer = target.dump(target.pyspy(body), deadline_seconds=6.0)
    assert fault_of(answer).reason == "Timeout"
    assert 6.0 <= answer.duration_seconds < 9.0, "a deadline of its own would end the second attempt after 9 s"
    assert len(target.calls) == 2


# --- its output ------------------------------------------------------------------------------------------------------


def test_dump_larger_than_16_mib_is_a_fault(target: Target) -> None:
    whole = target.dump(target.pyspy("head -c 16777216 /dev/zero")).json
    assert whole == bytes(16 << 20)
    fault = fault_of(target.dump(target.pyspy("head -c 16777217 /dev/zero")))
    assert fault_parts(fault) == ("TooLarge", "tool", "more than 16 MB of stacks", "")


def test_error_output_counts_towards_the_size_limit(target: Target) -> None:
    assert fault_of(target.dump(target.pyspy("head -c 16777217 /dev/zero >&2; exec sleep 600"))).reason == "TooLarge"


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("exit 0", "py-spy ended with status 0 and no message"),
        ("echo; exit 0", "py-spy ended with status 0 and no message"),
        ("echo '[]'; exit 3", "py-spy ended with status 3 and no message"),
        (r"printf 'Error: \377 bytes' >&2; exit 1", "\ufffd bytes"),
        ("printf 'Error: one\\n\\nCaused by:\\n    0: two\\n    1: three\\n' >&2; exit 1", "one: two: three"),
        ("printf 'one\\nStack backtrace:\\n   0: two\\n' >&2; exit 1", "one"),
    ],
)
def test_failed_dump_reports_the_message_of_pyspy(target: Target, body: str, detail: str) -> None:
    assert fault_parts(fault_of(target.dump(target.pyspy(body)))) == ("DumpFailed", "tool", detail, "")


def test_pyspy_that_a_signal_ends_reports_the_signal(target: Target) -> None:
    fault = fault_of(target.dump(target.pyspy("echo 'Error: no stack' >&2; kill -SEGV $$")))
    assert (fault.reason, fault.about) == ("DumperCrashed", "tool")
    assert fault.detail == "py-spy was ended by signal 11 (SIGSEGV): no stack"


def test_pyspy_that_answers_but_hangs_is_ended(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_runner, "KILL_SECONDS", 0.1)
    body = f"echo $$ > {target.folder}/pid; {STACKS}; exec sleep 600 >&- 2>&-"
    fault = fault_of(target.dump(target.pyspy(body), deadline_seconds=3.0))
    assert fault_parts(fault) == ("Timeout", "tool", "py-spy printed its answer and did not end", "")
    assert not Path(f"/proc/{(target.folder / 'pid').read_text().strip()}").exists()


def test_pyspy_closing_one_stream_is_read_from_the_other(target: Target) -> None:
    assert target.dump(target.pyspy(f"exec 2>&-; sleep 0.1; {STACKS}")).json == b"[]\n"


def test_stopped_dump_is_interrupted_and_leaves_no_child(target: Target) -> None:
    stop = threading.Event()
    started = target.folder / "started"
    threading.Thread(target=lambda: (wait_for(started.exists, "py-spy"), stop.set())).start()
    fault = fault_of(target.dump(target.pyspy(f"touch {started}; exec sleep 600"), deadline_seconds=300.0, stop=stop))
    assert fault_parts(fault) == ("Interrupted", "tool", "hangwatch was asked to stop", "")
    assert pyspy.DUMPER.abandoned.count() == 0


def test_waiting_for_pyspy_uses_no_cpu(target: Target) -> None:
    program = target.pyspy(f"sleep 1; {STACKS}")
    used = time.process_time()
    assert target.dump(program).json == b"[]\n"
    assert time.process_time() - used < 0.5


def test_unset_stop_event_changes_nothing(target: Target) -> None:
    assert target.dump(target.pyspy(STACKS), stop=threading.Event()).json == b"[]\n"


# --- a py-spy that cannot be ended -----------------------------------------------------------------------------------


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Make SIGKILL ineffective until the end of the test, as in a blocked system call. Yield the started children."""
    kept: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: kept.append(child))
    monkeypatch.setattr(child_runner, "KILL_SECONDS", 0.05)
    yield kept
    for child in kept:
        os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: pyspy.DUMPER.abandoned.count() == 0, "all to be reaped")


def test_unkillable_pyspy_is_abandoned_and_named(target: Target, unkillable: list[subprocess.Popen[bytes]]) -> None:
    program = target.pyspy("exec sleep 600")
    first = target.dump(program, deadline_seconds=0.1)
    (child,) = unkillable
    fault = fault_of(first)
    assert (fault.reason, fault.about, fault.reason in pyspy.STUCK_REASONS) == ("DumperStuck", "tool", True)
    assert f"py-spy (pid {child.pid}) hangs in the kernel" in fault.detail
    assert "file system" in fault.remedy and "dmesg" in fault.remedy
    assert pyspy.DUMPER.abandoned.count() == 1
    assert (child.stdout is not None and child.stdout.closed, child.stderr is not None and child.stderr.closed) == (
        True,
        True,
    ), "our ends of its pipes are closed"
    again = target.dump(program)
    assert (again.fault, again.duration_seconds, len(unkillable)) == (fault, 0.0, 1)


def test_process_is_dumped_again_once_pyspy_has_ended(
    target: Target, unkillable: list[subprocess.Popen[bytes]]
) -> None:
    target.dump(target.pyspy("exec sleep 600"), deadline_seconds=0.1)
    os.kill(unkillable.pop().pid, signal.SIGKILL)
    wait_for(lambda: pyspy.DUMPER.abandoned.count() == 0, "it to be reaped")
    assert target.dump(target.pyspy(STACKS)).fault is None


def test_too_many_abandoned_dumpers_of_a_share_refuse_another(
    target: Target, unkillable: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    for number in range(child_runner.MOST_ABANDONED_OF_SHARE):
        other = Target(tmp_path / str(number))
        stat = other.proc / str(TARGET) / "stat"
        stat.write_text(stat.read_text().replace("1000", str(2000 + number)))
        other.dump(other.pyspy("exec sleep 600"), deadline_seconds=0.1)
    answer = target.dump(target.pyspy(STACKS))
    fault = fault_of(answer)
    assert (fault.reason, fault.about, target.calls) == ("TooManyDumpersStuck", "tool", [])
    assert fault.reason in pyspy.STUCK_REASONS
    assert "no further child is started" in fault.detail
    assert answer.duration_seconds < 20, "there is nothing to wait for"
    assert target.dump(target.pyspy(STACKS), share="a pod").fault is None
    target.shows("S", uid=1005)
    assert target.dump(target.pyspy(STACKS)).fault is None
