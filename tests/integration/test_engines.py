"""Processes with the titles of inference engines: the daemon lists them and does not judge them; people dump them."""

import json
from pathlib import Path

from click.testing import CliRunner

from hangwatch.cli.dump import dump
from hangwatch.tools.commands.status import status
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.integration import targets
from tests.real_daemon import RealDaemon, hang
from tests.simulated.node import SimulatedNode

# A command line that was read before the title was set stays that of multiprocessing.
ENGINE = """
import ctypes, os, time
def become(title):
    ctypes.CDLL(None).prctl(15, title.encode(), 0, 0, 0)
def wait_for_requests(name):
    open(f"{folder}/pid-{name}", "w").write(str(os.getpid()))
    time.sleep(600)
become("VLLM::EngineCore")
for number in range(2):
    if os.fork() == 0:
        become(f"VLLM::Worker_TP{number}")
        wait_for_requests(number)
ready()
wait_for_requests("core")
"""


def pid_of(folder: Path, name: object) -> int:
    return int(wait_for(lambda: (folder / f"pid-{name}").exists() and (folder / f"pid-{name}").read_text(), "pid"))


def test_idle_engine_is_listed_and_never_judged(fake_driver: FakeDriver, tmp_path: Path) -> None:
    """The other job hangs and pages at the same power."""
    with targets.python(ENGINE, tmp_path) as core, SimulatedNode(2) as node:
        workers = [pid_of(tmp_path, number) for number in range(2)]
        holders = [*node.pids, *workers]
        fake_driver.write([*h100(4), *(f"gpu {gpu} pids {pid}" for gpu, pid in enumerate(holders))])
        with RealDaemon(tmp_path / "hw", fake_driver.environ) as daemon:
            daemon.wait_for_state(node.run_id, "training")
            hang(daemon, node, fake_driver, 1)
            seen = daemon.status()
            shown = CliRunner().invoke(status, ["--url", f"http://{daemon.address}"]).stdout
    (engine,) = (engine for engine in seen["engines"] if engine["job_id"].startswith(f"pid{core}-"))
    assert engine["job_key"] not in [job["job_key"] for job in seen["jobs"]]
    assert (engine["program"], engine["workers"]) == ("vLLM", 2)
    assert [[job["job_id"] for job in gpu["jobs"]] for gpu in seen["gpus"][2:]] == [[engine["job_id"]]] * 2
    assert f"engine, 2 workers: vLLM ({engine['job_id']}, {engine['owner']}), not monitored\n" in shown


def test_workers_of_an_engine_are_dumped_like_ranks(tmp_path: Path) -> None:
    with targets.python(ENGINE, tmp_path) as core:
        workers = sorted(pid_of(tmp_path, number) for number in range(2))
        (of_core,) = json.loads(CliRunner().invoke(dump, ["--json", "--pid", str(core)]).stdout)["jobs"]
        answer = json.loads(CliRunner().invoke(dump, ["--json", "--job", of_core["job"]["job_id"]]).stdout)
    (of_job,) = answer["jobs"]
    for job in (of_core, of_job):
        assert sorted(rank["id"]["pid"] for rank in job["capture"]["ranks"]) == workers
