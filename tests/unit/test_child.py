"""The runner of child processes: environment and limits of a child, and limits on abandoned children."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.model import Fault, ProcessId
from hangwatch.probes.base import child_runner, pseudo_files
from hangwatch.probes.base.child import Child
from hangwatch.probes.base.child_runner import (
    MOST_ABANDONED,
    MOST_ABANDONED_OF_SHARE,
    AbandonedChildren,
    Printed,
    Runner,
)
from tests.conftest import wait_for

US = ProcessId(pid=os.getpid(), start_ticks=0)
ENDS = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
SLEEPS = "import time; time.sleep(600)"
FLOODS = "while True: print('x' * 65536)"


def run(runner: Runner, code: str, *, seconds: float = 60.0, question: bytes | None = None) -> Printed | Fault:
    command = [sys.executable, "-I", "-S", "-c", code]
    return runner.run(command, US, share="", deadline_seconds=seconds, question=question)


def printed(answer: Printed | Fault) -> bytes:
    assert isinstance(answer, Printed), answer
    return answer.out


@pytest.fixture
def many_files() -> Iterator[None]:
    """Hold more open files than select(2) supports."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in kept:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_child_environment_and_descriptors_are_minimal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    code = "import json, os\nprint(json.dumps([os.getcwd(), sorted(os.environ), os.listdir('/proc/self/fd')]))"
    folder, names, files = json.loads(printed(run(Runner("child"), code)))
    os.close(reader), os.close(writer)
    assert (folder, set(names) - {"LC_CTYPE"}) == ("/", {"PATH", "RUST_BACKTRACE"})
    assert set(files) == {"0", "1", "2", "3"}, "3 is the folder that it lists"


def test_child_memory_is_bounded() -> None:
    code = "import resource, sys; sys.stdin.read(); print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    assert int(printed(run(Runner("child"), code, question=b""))) == child_runner.MOST_MEMORY_BYTES
    assert int(printed(run(Runner("child", most_memory_bytes=1 << 28), code, question=b""))) == 1 << 28


def test_kernel_without_memory_ends_the_child_first() -> None:
    code = "import sys; sys.stdin.read(); print(open('/proc/self/oom_score_adj').read())"
    assert int(printed(run(Runner("child"), code, question=b""))) == 1000


def test_child_question_larger_than_a_pipe_is_read() -> None:
    assert (
        printed(run(Runner("child"), "import sys; print(len(sys.stdin.read()))", question=b"x" * 300_000))
        == b"300000\n"
    )


def test_child_not_reading_its_question_times_out() -> None:
    began = time.monotonic()
    answer = run(Runner("child"), SLEEPS, seconds=0.5, question=b"x" * 300_000)
    assert isinstance(answer, Fault) and answer.reason == "Timeout"
    assert time.monotonic() - began < 30


def test_child_with_high_descriptors_is_read(many_files: None) -> None:
    assert run(Runner("child"), ENDS) == Printed(3, b"out\n", b"err\n")


def test_child_that_cannot_start_is_a_fault(tmp_path: Path) -> None:
    answer = Runner("child").run([str(tmp_path / "none")], US, share="", deadline_seconds=1.0)
    assert isinstance(answer, Fault)
    assert (answer.reason, answer.detail) == ("CannotStart", f"{tmp_path}/none: No such file or directory")


def test_program_by_a_relative_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program").symlink_to("/bin/echo")
    answer = Runner("child").run(["./program", "x"], US, share="", deadline_seconds=60.0)
    assert printed(answer) == b"x\n"


def test_partial_answer_is_kept_if_the_runner_keeps_parts() -> None:
    prints = ["sh", "-c", "echo part; exec sleep 600"]
    assert printed(Runner("child", keeps_part=True).run(prints, US, share="", deadline_seconds=4.0)) == b"part\n"
    assert printed(run(Runner("child", keeps_part=True, most_bytes=1000), FLOODS)) == b"x" * 1000


def test_descendants_of_a_child_end_with_it() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"
    pid = int(printed(run(Runner("child", keeps_part=True), code)))
    wait_for(lambda: " Z " in (pseudo_files.read_or_empty(f"/proc/{pid}/stat") or " Z "), "its end")


@pytest.fixture
def sleeper() -> Iterator[Child]:
    one = Child(["sleep", "600"])
    yield one
    assert one.end(10.0)


def target(number: int) -> ProcessId:
    return ProcessId(pid=number, start_ticks=1)


def fill(abandoned: AbandonedChildren, sleeper: Child, share: int, count: int) -> int:
    """Abandon at most `count` children of user `share`, until the limit. Return their number."""
    for number in range(count):
        if not abandoned.begin(f"uid {share}", 0.0):
            return number
        abandoned.end(f"uid {share}", target(1000 * share + number), sleeper)
    return count


def test_one_user_cannot_use_up_what_all_share(sleeper: Child) -> None:
    left = AbandonedChildren()
    assert fill(left, sleeper, 1, 100) == MOST_ABANDONED_OF_SHARE
    assert left.begin("uid 2", 0.0)


def test_there_is_a_bound_over_all(sleeper: Child) -> None:
    left = AbandonedChildren()
    assert sum(fill(left, sleeper, user, 100) for user in range(1, 20)) == MOST_ABANDONED == left.count()


def test_what_still_runs_counts_as_if_it_stayed(sleeper: Child) -> None:
    left = AbandonedChildren()
    assert [left.begin("uid 1", 0.0) for _ in range(MOST_ABANDONED_OF_SHARE + 1)] == [
        True
    ] * MOST_ABANDONED_OF_SHARE + [False]
    left.end("uid 1", target(1), None)
    assert left.begin("uid 1", 0.0)


def test_those_that_end_are_reaped_and_forgotten(sleeper: Child) -> None:
    left = AbandonedChildren()
    fill(left, sleeper, 1, MOST_ABANDONED_OF_SHARE)
    assert left.pid_for(target(1000)) == sleeper.pid
    sleeper.kill()
    wait_for(lambda: left.count() == 0, "the child to be reaped")
    assert (left.pid_for(target(1000)), left.begin("uid 1", 0.0)) == (None, True)
