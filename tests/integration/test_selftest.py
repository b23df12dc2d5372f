"""`hangwatch selftest` with real ranks over gloo: they are healthy, or some hang, are slow or are killed."""

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import jsonschema
import pytest

from hangwatch.tools.selftest import launch
from hangwatch.tools.selftest.outcome import judge
from tests import schemas
from tests.commands import HANGWATCH, Finished, finished, write_program

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

COMMAND = [*HANGWATCH, "selftest", "--python", sys.executable]


def planted(folder: Path, where: str, module: str, function: str, trouble: str) -> dict[str, str]:
    """Return an environment in which a process runs the code `trouble` before each call of a function.

    Only processes for which the expression `where` is true run it, and only after all ranks have connected.
    """
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""\
        import os, sys, threading, time
        def plant():
            while not getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)():
                time.sleep(0.001)
            module = sys.modules["{module}"]
            plain = module.{function}
            def planted(*arguments, **named):
                {trouble}
                return plain(*arguments, **named)
            module.{function} = planted
        if {where}:
            threading.Thread(target=plant, daemon=True).start()
        """)
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def on_device(device: int) -> str:
    return f'"--device={device}" in sys.orig_argv'


def run(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> Finished:
    return finished(*command, env=environ, timeout=380)


def test_ranks_that_are_well_pass() -> None:
    done = run([*COMMAND, "--ranks", "3", "--json"])
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["passed"], answer["backend"], answer["findings"]) == (0, True, "gloo", [])
    jsonschema.Draft202012Validator(json.loads(schemas.path("selftest").read_text())).validate(answer)


def test_the_rank_that_hangs_before_a_collective_is_named(tmp_path: Path) -> None:
    done = run(
        [*COMMAND, "--ranks", "3", "--timeout-seconds", "10", "--json"],
        planted(tmp_path, on_device(2), "torch", "full", "time.sleep(1e6)"),
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(one["kind"], one["ranks"]) for one in answer["findings"]] == [("hung", [2])], answer


def test_rank_that_hangs_inside_a_collective_is_found_by_bisection(tmp_path: Path) -> None:
    """Test other pairs if both ranks of a pair join and neither returns: only other pairs show the culprit."""
    done = run(
        [*COMMAND, "--ranks", "4", "--timeout-seconds", "10", "--bisect", "--json"],
        planted(tmp_path, on_device(2), "torch.distributed", "all_reduce", "time.sleep(1e6)"),
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(one["kind"], one["ranks"]) for one in answer["findings"]] == [("cannot_talk", [2, 3])], answer
    assert (answer["suspects"], answer["is_sure"]) == (["2"], True)
    assert answer["tries"] <= 4  # the first try, and log2(4) + 1


def test_the_rank_that_keeps_the_others_waiting_is_named(tmp_path: Path) -> None:
    done = run([*COMMAND, "--ranks", "3"], planted(tmp_path, on_device(1), "torch", "full", "time.sleep(0.6)"))
    assert done.returncode == 1
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed.startswith("FAILED: Rank 1 joined "), failed
    assert failed.endswith("(device 1)")


STOPS_AFTER_ITS_FIRST_LINE = """\
import os, runpy, signal, sys
class Output:
    def write(self, text): sys.__stdout__.write(text)
    def flush(self):
        sys.__stdout__.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
sys.stdout = Output()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_stopped_rank_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """Let rank 2 stop itself after it prints its pid. The selftest must end all its processes, also the stopped one."""
    pids: list[int] = []

    def keep_pid(line: str) -> None:
        if "pid " in line:
            pids.append(int(line.split("pid ")[1].split(",", maxsplit=1)[0]))

    (tmp_path / "stopping.py").write_text(STOPS_AFTER_ITS_FIRST_LINE)
    python = write_program(
        tmp_path / "python",
        f'if [ "$RANK" = 2 ]; then set -- {tmp_path}/stopping.py "$@"; fi\nexec {sys.executable} "$@"',
    )
    plan = launch.Plan(python=str(python), timeout_seconds=8.0)
    course = launch.run([str(rank) for rank in range(3)], plan, keep_pid)
    (finding,) = judge(course.events, course.exits, 3, 0.2)
    assert (finding.kind, finding.ranks) == ("hung", (2,)), finding
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.machines
def test_rank_under_a_launcher_reports_the_missing_ranks(tmp_path: Path) -> None:
    """Start the script of a rank as torchrun does: the store has which ranks have joined."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=3", "--rdzv-backend=c10d"]
    done = run(
        [*torchrun, "--rdzv-endpoint=127.0.0.1:0", str(launch.SCRIPT), "--timeout-seconds=10"],
        planted(tmp_path, 'os.environ.get("RANK") == "1"', "torch", "full", "time.sleep(1e6)"),
    )
    assert done.returncode != 0
    assert "missing=[1]" in done.stdout, done.stdout + done.stderr


def test_an_interpreter_that_is_none_is_told_with_its_exit_status() -> None:
    done = run([*COMMAND[:-1], "/bin/true", "--ranks", "2"])
    assert done.returncode == 1
    assert "ranks 0-1 ended with status 0, but printed nothing" in done.stdout, done.stdout


def test_without_torch_it_is_said_what_to_type() -> None:
    bare = run([*COMMAND[:-1], "/usr/bin/python3", "--ranks", "2"])
    if bare.returncode != 2:
        pytest.skip("needs a python3 of the system without torch")
    assert bare.stderr.count("has no torch") == 1
    assert "--python" in bare.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--devices", "7"), "this node has no GPU 7"),
        (("--devices", "x"), "must be a list of numbers"),
        (("--devices", "0", "--ranks", "2"), "either --devices or --ranks"),
        (("--python", "/nonexistent/python", "--ranks", "2"), "No such file or directory"),
        (("--script", "--late-seconds", "0"), "--late-seconds"),
    ],
)
def test_bad_input_is_answered(options: tuple[str, ...], error: str) -> None:
    done = run([*COMMAND[:4], *options])
    assert done.returncode == 2
    assert error in done.stderr
