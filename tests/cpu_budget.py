"""A pytest plugin: the CPU seconds of all tests and of the children that they waited for.

Unlike wall time, they hardly depend on what else the machine does. A run ends with their sum and the dearest files. With
HANGWATCH_CPU_BUDGET in the environment, the run fails if the sum exceeds the budget. Its unit is one `import torch`,
measured in the same run, so a slow machine does not exceed it.
"""

import os
import statistics
import subprocess
import sys
from collections import Counter

import pytest

SHOWN_FILES = 10
TOLERANCE = 1.15
SPENT = Counter[str]()
_STARTS: dict[str, float] = {}


def now() -> float:
    return sum(os.times()[:4])


def unit_seconds() -> float:
    """Return the CPU seconds of one `import torch`."""
    costs = []
    for _ in range(3):
        before = now()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        costs.append(now() - before)
    return statistics.median(costs)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _STARTS[item.nodeid] = now()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    outcome = yield
    if call.when == "teardown" and item.nodeid in _STARTS:
        outcome.get_result().user_properties = [("cpu_seconds", now() - _STARTS.pop(item.nodeid))]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SPENT[report.nodeid.partition("::")[0]] += sum(  # type: ignore[assignment]
        value for name, value in report.user_properties if name == "cpu_seconds" and report.when == "teardown"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total = sum(SPENT.values())
    dearest = ", ".join(f"{file} {seconds:.0f}" for file, seconds in SPENT.most_common(SHOWN_FILES) if seconds >= 1)
    terminalreporter.write_line(f"CPU seconds of the tests: {total:.0f}; {dearest}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    budget = float(os.environ.get("HANGWATCH_CPU_BUDGET", 0))
    if budget and not hasattr(session.config, "workerinput"):
        used = sum(SPENT.values()) / unit_seconds()
        print(f"\nCPU budget: {used:.0f} of {budget:.0f} times `import torch`")
        if used > TOLERANCE * budget:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
