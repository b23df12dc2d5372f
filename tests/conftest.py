"""Fixtures and hooks of all tests.

* In CI no test may skip.
* Golden files are compared, or rewritten by `make golden`.
* A test waits for a condition under a deadline; it does not sleep.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from hypothesis import settings
from msgspec import toml

from hangwatch.model import ProcessId
from hangwatch.probes.base import procfs
from tests.node_tree import NodeTree

pytest_plugins = ["tests.certificates", "tests.cpu_budget", "tests.fake_driver"]

# A test that is slow on a loaded CI machine is not a finding. `make long PART=fuzz` tries more examples.
settings.register_profile("hangwatch", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("hangwatch")

T = TypeVar("T")
SHARED_MACHINE = 2.0
DATA = Path(__file__).parent / "data"


def load_table(name: str) -> dict[str, Any]:
    """Return a table of tests/data."""
    return toml.decode((DATA / name).read_text())


# Files with tests that share something expensive, or that need most of the CPU. Those of test_torchrun need their order.
TOGETHER = (
    "deploy/test_container.py",
    "deploy/test_grafana.py",
    "integration/test_demo_node.py",
    "integration/test_nodes_in_namespaces.py",
    "integration/test_nodes_over_slurm.py",
    "integration/test_nodes_over_ssh.py",
    "integration/test_recorder_jobs.py",
    "integration/test_requeue_over_slurm.py",
    "integration/test_torchrun.py",
    "test_contract.py",
    "scenarios/test_crowds.py",
)


# Files of the lane `machines`: real systemd, Slurm, ssh, containers, browsers, Prometheus, launchers of frameworks, and
# floods. A marker on a test of another file puts this test there, too.
_DEPLOY = "alertmanager container fleet_rule grafana rules runbooks systemd"
_INTEGRATION = """
arrivals chain demo_node engines fork_bomb frameworks hostile_environ hostile_input hung_before launch_ways
memory_limit nodes_in_namespaces nodes_over_slurm nodes_over_ssh page perfetto plain_rule progress_daemon real_hangs
report_on_a_phone requeue_of_hung_job requeue_over_slurm secrets_in_exceptions silent_mount socket_floods
titles waiting_launcher
"""
MACHINES = frozenset(
    f"tests/{folder}/test_{name}.py"
    for folder, names in (("deploy", _DEPLOY), ("integration", _INTEGRATION), ("scenarios", "crowds"))
    for name in names.split()
)
# Files with tests that wait, each of them for 16 seconds down to 1: the mean of (worker seconds - CPU seconds).
_WAITING = """
scenarios/processes integration/daemon integration/restart integration/job_libraries
integration/selftest integration/hooks integration/capture integration/merge integration/awaited_threads
integration/demo integration/memory integration/check_nodes integration/source_lines
integration/master_refused integration/signatures
integration/progress_counters integration/stop_while_writing integration/live_environ
unit/on_progress integration/user_socket integration/call_frames
"""
WAITING = [f"tests/{name.replace('/', '/test_')}.py" for name in _WAITING.split()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the lane `machines`, and sort: tests that wait begin first, because a run ends with the last."""
    files = {item.nodeid: item.nodeid.partition("::")[0] for item in items}
    for item in items:
        if files[item.nodeid] in MACHINES:
            item.add_marker("machines")
    order = {file: number for number, file in enumerate(WAITING)}
    items.sort(key=lambda item: order.get(files[item.nodeid], len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each test to the next free worker.

    A file of `TOGETHER` goes to one worker as a whole and runs first. A third of the workers begins at the other end:
    unit tests need the CPU while tests of daemons wait.
    """
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix("tests/")
            return file if file in TOGETHER else nodeid

        def _assign_work_unit(self, node: WorkerController) -> None:
            if int(node.gateway.id.removeprefix("gw")) < self.numnodes // 3:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install -e '.[torch]'")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Turn a skip into a failure in CI: .ci/run must install the missing program."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("HANGWATCH_NOTHING_MAY_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = {
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    }
    if reasons:
        terminalreporter.write_line(f"not tested here: {'; '.join(sorted(reasons))}")


def wait_for(probe: Callable[[], T], what: str, deadline_seconds: float = 60.0) -> T:
    """Call `probe` until it returns a true value, and return this value. Fail with `what` when the deadline passes.

    The pause between calls grows to 0.1 s, because a probe may be a scrape. The deadline is twice
    `deadline_seconds`, because other tests share the machine.
    """
    deadline_seconds *= SHARED_MACHINE
    end = time.monotonic() + deadline_seconds
    pause_seconds = 0.005
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline_seconds:g} s for {what}")
        time.sleep(pause_seconds)
        pause_seconds = min(1.3 * pause_seconds, 0.1)


def identity(pid: int) -> ProcessId:
    """Return the identity of a process that exists."""
    found = procfs.read_state(pid)
    return found[0]


class Stoppable(Protocol):
    """A server, sampler or daemon that runs until `stop`."""

    def stop(self) -> object: ...


@contextlib.contextmanager
def stopping(running: Stoppable) -> Iterator[None]:
    """Stop this at the end of `with`."""
    try:
        yield
    finally:
        running.stop()


def obeys_ctrl_c() -> None:
    """Restore the default action of SIGINT, which a program that a shell starts with `&` ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def open_folder(owner: int = -1) -> Iterator[Path]:
    """Make a folder that all users may enter, unlike pytest's folders. It belongs to this user, or to `owner`."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, owner, owner)
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def folder_for_all() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Let the process create files with exactly the mode that it asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MiB and return its path."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0755", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # the lock of a store may still be open


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with tests/data/golden/<name>. `make golden` rewrites the file instead."""

    def compare(name: str, text: str) -> None:
        path = DATA / "golden" / name
        if os.environ.get("HANGWATCH_RENEW_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run `make golden` and read the diff"
        assert text == path.read_text(), f"{path} differs: run `make golden` and read the diff"

    return compare


@pytest.fixture
def golden_part(request: pytest.FixtureRequest) -> Callable[[Path, str, Iterable[str]], None]:
    """Return a function that compares lines with a part of a page, or rewrites it with `make golden`."""

    def compare(page: Path, name: str, lines: Iterable[str]) -> None:
        begin, end = (f"<!-- {name}: {word} -->" for word in ("begin, printed by `make golden`", "end"))
        printed = "\n".join((begin, *lines, end))
        text = page.read_text()
        renewed, places = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: printed, text, flags=re.DOTALL)
        assert places == 1, f"{page}: the marks {begin} and {end} are missing"
        if os.environ.get("HANGWATCH_RENEW_GOLDEN"):
            page.write_text(renewed)
        assert renewed == page.read_text(), f"{page} is not what the code says: run `make golden` and read the diff"

    return compare
