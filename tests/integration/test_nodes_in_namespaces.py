"""Four nodes with real daemons, Prometheus and sshd. Two users' torchrun jobs run on all nodes. All tests share
them.

The jobs have the same run id and rendezvous address. In the first job, rank 2 on n2 is blocked in its own code. In
the second, rank 1 on n1 calls all_reduce in another group than the others. At the end n2 dies. The tests depend on
their order.
"""

import contextlib
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HANGWATCH, Finished, finished
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.integration.test_dump_nodes import answer
from tests.integration.test_page import alertmanager_config, paging_prometheus
from tests.namespace_nodes import JobOverNodes, Node, cluster, needs_namespaces, sshd_on
from tests.other_users import as_user
from tests.real_daemon import QUICK, RealDaemon, stop_at_shard
from tests.servers import RealAlertmanager, WebhookReceiver
from tests.ssh_nodes import needs_sshd

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600), needs_namespaces, needs_sshd]

NAMES = ("n0", "n1", "n2", "n3")
RUN_ID = "pretrain"
HUNG = RUN_ID + r"[^(]* \(uid {uid}, \w+\.py\) (is hung|has hung for \d+ min): "  # start of a page about the job
ADA, BOB = 4001, 4002
ADAS_GPU, BOBS_GPU = 0, 1
BUSY_WATTS, HUNG_WATTS = 600, 118
STANDS_SECONDS = 11  # a call that is blocked for ten seconds is captured twice
# Series that decide about a page. They are printed when a test fails.
HISTORY = (
    "up == 0",
    "hangwatch_job_state == 1",
    "hangwatch:job_waits:count",
    "hangwatch:job_progress:count",
    'hangwatch_rank_activity{motion="moving"}',
    "hangwatch:reported_ranks:count",
    "hangwatch:job_sequence:count",
    "hangwatch_job_collective_waited_number",
)
SHOWN_LABELS = ("instance", "state", "rank", "group", "kind")


class Fleet:
    """The nodes with their daemons, Prometheus and Alertmanager, and the two jobs."""

    def __init__(self, folder: Path, library: Path, stack: contextlib.ExitStack) -> None:
        self.nodes: dict[str, Node] = stack.enter_context(cluster(folder, NAMES))
        self.drivers = {name: FakeDriver(library, folder / f"{name}.scenario", h100(2)) for name in NAMES}
        self.ssh_config = stack.enter_context(sshd_on(self.nodes, folder / "ssh"))
        self.jobs = {
            uid: stack.enter_context(
                JobOverNodes(
                    folder / str(uid),
                    program,
                    self.nodes.values(),
                    uid=uid,
                    gpu=gpu,
                    run_id=RUN_ID,
                    port=29500 + gpu,
                )
            )
            for uid, program, gpu in ((ADA, "stuck_on_a_fifo.py", ADAS_GPU), (BOB, "wrong_group.py", BOBS_GPU))
        }
        self.daemons = {
            name: RealDaemon(
                folder / f"hw-{name}",
                self.drivers[name].environ,
                prefix=node.inside,
                http={**QUICK["http"], "listen": node.address},
                socket={"path": str(folder / f"socket-{name}")},
            )
            for name, node in self.nodes.items()
        }
        with ThreadPoolExecutor() as starting:
            list(starting.map(stack.enter_context, self.daemons.values()))
        # The hangwatch command on a node uses the configuration of the node's daemon.
        self.remote = folder / "hangwatch-there"
        self.remote.write_text(
            f'exec {sys.executable} -m hangwatch "$@" --config {folder}/hw-$(hostname)/hangwatch.toml\n'
        )
        self._keys: dict[int, str] = {}
        self.webhook = stack.enter_context(WebhookReceiver())
        config = alertmanager_config(self.webhook.url)
        for route in config["route"]["routes"]:
            route["group_interval"] = "1s"  # it sends resolved pages at once
        alertmanager = stack.enter_context(RealAlertmanager(folder / "am", config))
        self.prometheus = stack.enter_context(paging_prometheus(folder, self.daemons, alertmanager))

    def key(self, uid: int) -> str:
        """Return the key of this user's job. It is the same on all nodes."""
        if uid not in self._keys:
            owned = f'on (job_key) hangwatch_job_info{{owner="uid {uid}"}}'
            trains = f'hangwatch_job_state{{state="training"}} == 1 and {owned}'
            (self._keys[uid],) = {row["metric"]["job_key"] for row in self.prometheus.query(trains)}
        return self._keys[uid]

    def states(self, uid: int) -> dict[str, str]:
        """Return the state of this user's job on each node."""
        asked = f'hangwatch_job_state == 1 and on (job_key) hangwatch_job_info{{owner="uid {uid}"}}'
        return {row["metric"]["instance"]: row["metric"]["state"] for row in self.prometheus.query(asked)}

    def pages(self, uid: int) -> list[dict[str, Any]]:
        """Return the notifications to the on-call engineer about this user's job."""
        return [one for one in self.webhook.received("/on-call") if one["groupLabels"]["job_key"] == self.key(uid)]

    def wait_for_state(self, uid: int, *states: str) -> None:
        """Wait until the job of this user is in one of these states on each node."""

        def is_so() -> bool:
            shown = self.states(uid)
            return set(shown) == set(NAMES) and set(shown.values()) <= set(states)

        wait_for(is_so, f"the job of {uid} to be {' or '.join(states)}", 180)

    def set_power(self, gpu: int, watts: float) -> None:
        for driver in self.drivers.values():
            driver.add(f"gpu {gpu} power_watts {watts}")

    def tell(self) -> None:
        """Print a short history: changes of the series, logs of the daemons, reports and pages."""
        owners = {key: uid for uid, key in self._keys.items()}
        for expression in HISTORY:
            print(expression)
            for row in self.prometheus.query_range(expression, 300):
                spans = [f"{first}-{last}={value}" for first, last, value in _spans(row["values"])]
                labels = {name: text for name, text in row["metric"].items() if name in SHOWN_LABELS}
                print("  ", owners.get(row["metric"].get("job_key")), *labels.values(), *spans[:12])
        for daemon in self.daemons.values():
            print(*(line[11:130] for line in daemon.log.splitlines() if ": job " in line and "->" in line), sep="\n")
            for report in daemon.state.glob("incidents/*/report.txt"):
                told = re.findall(r"^.*sequence.*", report.read_text(), re.M)
                print(report.parent.name, *told, sep="\n  ")
        for page in self.webhook.received("/on-call"):
            (alert,) = page["alerts"]
            print(page["status"], alert["startsAt"][11:19], alert["endsAt"][11:19], alert["annotations"]["summary"])

    def dump(self, uid: int, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run `hangwatch dump` on all nodes over ssh. Return its output, and the part about this user's job."""
        where = ["--nodes", "n[0-3]", "--via", "ssh", "--via-options", f"-F {self.ssh_config}", "--deadline", "60"]
        there = ["--remote-command", f"sh {self.remote}"]
        command = [*HANGWATCH, "dump", *where, *there, *more, "--json"]
        done = finished(*command, timeout=200)
        told = answer(done)
        (job,) = [one for one in told["jobs"] if one["job"]["job_key"] == self.key(uid)]
        return told, job

    def dump_of_one(self, uid: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run `hangwatch dump` only for the job of this user, with `--job`. Return the same as `dump`."""
        return self.dump(uid, "--job", self.key(uid))


def _spans(values: list[tuple[float, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield begin, end and value of each period in which the value is constant."""
    for value, group in itertools.groupby(enumerate(values), lambda one: (one[1][1], float(one[1][0]) - one[0])):
        times = [time.strftime("%M:%S", time.gmtime(float(at))) for _, (at, _) in group]
        yield times[0], times[-1], value[0]


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, fake_nvml_library: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="fleet-"))  # only root may enter pytest's folders
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        made = Fleet(folder, fake_nvml_library, stack)
        failed = request.session.testsfailed
        yield made
        if request.session.testsfailed > failed:
            made.tell()


def test_of_two_jobs_of_one_name_the_hung_one_pages_by_owner_and_rank(fleet: Fleet) -> None:
    for uid, job in fleet.jobs.items():
        job.wait_for_step(3)
        fleet.wait_for_state(uid, "training")
    assert fleet.key(ADA) != fleet.key(BOB)

    folder = fleet.jobs[ADA].folder
    os.mkfifo(folder / "shard")
    stop_at_shard(folder)
    fleet.set_power(ADAS_GPU, HUNG_WATTS)
    fleet.drivers["n2"].add(f"gpu {ADAS_GPU} power_watts 86", f"gpu {ADAS_GPU} utilization_ratio 0")
    (page,) = wait_for(lambda: fleet.pages(ADA), "the page", 120)
    (alert,) = page["alerts"]
    assert alert["labels"]["alertname"] == "HangwatchTrainingHung"
    summary = alert["annotations"]["summary"]
    assert re.match(HUNG.format(uid=ADA) + "rank 2 on n2$", summary), summary
    fleet.wait_for_state(BOB, "training")
    assert fleet.pages(BOB) == []


def test_a_dump_over_ssh_names_the_same_rank(fleet: Fleet) -> None:
    told, job = fleet.dump(ADA)
    assert (told["answered"], told["unanswered"], told["failed"]) == (list(NAMES), [], [])
    assert rank_and_node(job["verdict"]["named"]) == [(2, "n2")]


def test_equal_stacks_on_all_nodes_are_judged_by_sequence_numbers(fleet: Fleet) -> None:
    job = fleet.jobs[BOB]
    job.wait_for_step(job.steps + 3)
    (job.folder / "part").touch()
    fleet.set_power(BOBS_GPU, HUNG_WATTS)
    (page,) = wait_for(lambda: fleet.pages(BOB), "the page", 120)
    (alert,) = page["alerts"]
    summary = alert["annotations"]["summary"]
    assert re.match(HUNG.format(uid=BOB) + "no rank named; check rank 1 on n1$", summary), summary
    wait_for(lambda: job.seconds_since_step > STANDS_SECONDS, "a dump to report it as possibly blocked")
    _, dumped = fleet.dump_of_one(BOB)
    assert (dumped["verdict"]["kind"], rank_and_node(dumped["verdict"]["check_first"])) == ("Cycle", [(1, "n1")])
    assert len(dumped["groups"]) == 1, "all stacks are equal"


def test_a_node_that_is_cut_off_is_unanswered_and_the_rank_is_named(fleet: Fleet) -> None:
    with fleet.nodes["n1"].cut_off():
        told, job = fleet.dump_of_one(ADA)
    assert (told["answered"], told["unanswered"], told["failed"]) == (["n0", "n2", "n3"], ["n1"], [])
    assert job["absent"] == [[1, 1]]
    assert rank_and_node(job["verdict"]["named"]) == [(2, "n2")]


def test_where_the_culprits_node_is_cut_off_it_is_said_with_its_ranks(fleet: Fleet) -> None:
    with fleet.nodes["n2"].cut_off():
        told, job = fleet.dump_of_one(ADA)
    assert (told["answered"], told["unanswered"], told["failed"]) == (["n0", "n1", "n3"], ["n2"], [])
    assert job["absent"] == [[2, 2]]
    assert job["verdict"]["named"] == []
    votes = {vote["kind"]: vote["message"] for vote in job["verdict"]["evidence"]}
    assert "no response from 1 node (n2)" in votes["unanswered_nodes"]
    assert len(fleet.pages(ADA)) == 1, "one page, whichever node answers meanwhile"

    (fleet.jobs[ADA].folder / "shard").write_bytes(b"shard")
    fleet.set_power(ADAS_GPU, BUSY_WATTS)


def test_a_node_that_dies_with_its_daemon_is_one_page_that_names_it_and_its_ranks(fleet: Fleet) -> None:
    wait_for(lambda: fleet.pages(ADA)[1:], "the page to resolve", 120)
    fleet.wait_for_state(ADA, "training", "recovered")

    fleet.nodes["n2"].delete()
    fleet.set_power(ADAS_GPU, HUNG_WATTS)
    wait_for(lambda: fleet.jobs[ADA].seconds_since_step > STANDS_SECONDS, "all other ranks to wait for rank 2")
    told, job = fleet.dump_of_one(ADA)
    assert (told["answered"], told["unanswered"], told["failed"]) == (["n0", "n1", "n3"], ["n2"], [])
    assert (job["absent"], job["verdict"]["named"]) == ([[2, 2]], [])
    wait_for(lambda: fleet.pages(ADA)[2:], "the page", 240)
    hung, resolved, died = fleet.pages(ADA)
    assert [hung["status"], resolved["status"], died["status"]] == ["firing", "resolved", "firing"]
    (alert,) = died["alerts"]
    said = alert["annotations"]
    assert re.match(HUNG.format(uid=ADA), said["summary"]), said["summary"]
    assert said["summary"].endswith(": n2 does not respond")
    assert "n2 does not respond; ranks of the job on it: 1 (numbers 2)" in said["description"]
    assert len(fleet.pages(BOB)) == 1, "the other one was told of before"


def test_silence_by_the_owner_on_one_node_ends_the_page_of_its_job_only(fleet: Fleet) -> None:
    def silence(uid: int, *arguments: str) -> Finished:
        there = [*fleet.nodes["n0"].inside, *as_user(uid), *HANGWATCH, "silence"]
        command = [*there, fleet.key(BOB), *arguments, "--config", str(fleet.daemons["n0"].config)]
        return finished(*command, cwd="/")

    firing = 'ALERTS{alertname="HangwatchTrainingHung",alertstate="firing"}'

    def paged() -> set[str]:
        return {row["metric"]["job_key"] for row in fleet.prometheus.query(firing)}

    wait_for(lambda: paged() == {fleet.key(ADA), fleet.key(BOB)}, "both pages", 120)
    refused = silence(ADA, "--for", "2h")
    assert refused.returncode == 2 and "no job of yours on this node has exactly this name or key" in refused.stderr
    done = silence(BOB, "--for", "2h", "--reason", "I debug it")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: paged() == {fleet.key(ADA)}, "the end of the page of one job", 60)
    hung = {row["metric"]["job_key"] for row in fleet.prometheus.query("hangwatch:job_hung:since")}
    assert fleet.key(BOB) in hung, "the job still hangs"
    assert silence(BOB, "--end").returncode == 0
    wait_for(lambda: paged() == {fleet.key(ADA), fleet.key(BOB)}, "the page again", 60)


def rank_and_node(ranks: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the number and the node of each rank of a verdict."""
    return [(rank["rank"], rank["node"]) for rank in ranks]
