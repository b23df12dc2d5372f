"""A light capture by the real daemon.

A job hangs at a power that does not count as low, so only a light capture can find it.
"""

import subprocess
from contextlib import ExitStack
from pathlib import Path

from hangwatch.demo.simulated_node import SimulatedNode
from hangwatch.probes.process import main_thread, procfs, pyspy
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.integration import targets
from tests.real_daemon import RealDaemon

RANKS, STUCK = 4, 2


def test_light_job_that_hangs_gets_a_light_capture_and_is_then_suspected(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    with SimulatedNode(RANKS) as node, ExitStack() as stack:
        lines = [*h100(RANKS), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))]
        fake_driver.write([*lines, "gpu all power_watts 250"])  # before the daemon: else it sees the power fall
        daemon = stack.enter_context(RealDaemon(tmp_path / "hw", fake_driver.environ))
        daemon.wait_for_state(node.run_id, "training")
        assert _dumps(daemon) == 0
        node.order(STUCK, "lock")
        stuck = node.pids[STUCK]
        wait_for(lambda: _is_in(stuck, "log_metrics"), "a rank that waits for its lock")
        wait_for(lambda: targets.futex_call(stuck), "it to wait")
        waiting = [pid for pid in node.pids if pid != stuck]
        wait_for(lambda: _stand_in(waiting, "all_reduce"), "the other ranks to wait for it")
        before = _switches(stuck)

        fake_driver.write([*lines, "gpu all power_watts 160", f"gpu {STUCK} utilization_ratio 0"])
        wait_for(lambda: _dumps(daemon) >= RANKS, "the first round of a light capture")
        states, seen = [], set()
        while daemon.job_state(node.run_id) == "training":
            states += [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in node.pids]
            seen.add(_switches(stuck))
        assert set(states) <= set("RSD"), "T and t are the states of a stopped process"
        assert seen <= {before}, "a process that is stopped and continued in a wait is scheduled once more"
        daemon.wait_for_state(node.run_id, "hung")

        assert ": taking stacks of 4 ranks: its power fell and has been flat for 3 s" in daemon.log
        assert "training -> quiet" not in daemon.log
        assert "ranks do not progress" in daemon.log.partition("training -> suspected")[2].splitlines()[0]
        ((row, _),) = daemon.samples("hangwatch_incident_info")
        assert row["named"].endswith(f":{STUCK}")

        before = _switches(stuck)
        subprocess.run([str(pyspy.find()), "dump", "--pid", str(stuck)], check=True, capture_output=True, timeout=60)
        assert _switches(stuck) > before, "a dump with a pause would have been seen"


def _dumps(daemon: RealDaemon) -> float:
    return sum(value for _, value in daemon.samples("hangwatch_dump_seconds_count"))


def _is_in(pid: int, function: str) -> bool:
    answer = pyspy.dump(pid, deadline_seconds=60.0, mode=pyspy.DumpMode(may_pause=False))
    return answer.json is not None and f'"{function}"'.encode() in answer.json


def _stand_in(pids: list[int], function: str) -> bool:
    """True if all processes are in `function` and none ran during the dumps.

    A process that ran may have left another call only then.
    """
    before = [_switches(pid) for pid in pids]
    return all(_is_in(pid, function) for pid in pids) and before == [_switches(pid) for pid in pids]


def _switches(pid: int) -> int:
    counters = main_thread.read_counters(pid, procfs.PROC)
    assert counters is not None and counters.voluntary_switches is not None
    return counters.voluntary_switches
