"""Two hangs at one line on two nodes: the second page, report and list of incidents tell of the first."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HANGWATCH, finished
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.integration.test_page import HUNG_POWER, alertmanager_config, paging_prometheus
from tests.namespace_nodes import cluster, needs_namespaces
from tests.real_daemon import QUICK, RealDaemon, TorchJob, stop_at_shard
from tests.servers import RealAlertmanager, WebhookReceiver
from tests.ssh_nodes import needs_sshd

pytestmark = [pytest.mark.torch, pytest.mark.timeout(500), needs_namespaces, needs_sshd]

NAMES = ("n0", "n1")


def page_of(webhook: WebhookReceiver, job: TorchJob) -> str:
    """Return the description of the page about a job."""

    def find() -> list[str]:
        received = webhook.received("/on-call")
        alerts = [alert for one in received if one["status"] == "firing" for alert in one["alerts"]]
        return [alert["annotations"]["description"] for alert in alerts if alert["labels"]["job_id"] == job.run_id]

    return wait_for(find, f"the page of {job.run_id}", 120)[0]


@contextlib.contextmanager
def hung_job(folder: Path, daemon: RealDaemon, driver: FakeDriver, prefix: list[str]) -> Iterator[TorchJob]:
    """Yield a job of four ranks on one node; rank 2 does not return from `read_shard`."""
    folder.mkdir()
    os.mkfifo(folder / "shard")
    driver.write(h100(4))
    run_id = f"pretrain-{folder.name}"
    with TorchJob(
        folder, "stuck_on_a_fifo.py", prefix=prefix, run_id=run_id, node_rank=0, endpoint="127.0.0.1:29511"
    ) as job:
        job.wait_for_step(3)
        daemon.wait_for_state(job.run_id, "training")
        stop_at_shard(folder)
        driver.add(*HUNG_POWER)
        yield job


def test_second_page_shows_that_it_happened_before_and_where(tmp_path: Path, fake_nvml_library: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(cluster(tmp_path, NAMES))
        drivers = {name: FakeDriver(fake_nvml_library, tmp_path / f"{name}.scenario", h100(4)) for name in NAMES}
        daemons = {
            name: stack.enter_context(
                RealDaemon(
                    tmp_path / f"hw-{name}",
                    drivers[name].environ,
                    prefix=node.inside,
                    http={**QUICK["http"], "listen": node.address},
                )
            )
            for name, node in nodes.items()
        }
        webhook = stack.enter_context(WebhookReceiver())
        alertmanager = stack.enter_context(RealAlertmanager(tmp_path / "am", alertmanager_config(webhook.url)))
        stack.enter_context(paging_prometheus(tmp_path, daemons, alertmanager))

        with hung_job(tmp_path / "first", daemons["n0"], drivers["n0"], nodes["n0"].inside) as job:
            assert "Before: " not in page_of(webhook, job)
        daemons["n0"].wait_for_state(job.run_id, "ended")
        with hung_job(tmp_path / "second", daemons["n1"], drivers["n1"], nodes["n1"].inside) as job:
            page = page_of(webhook, job)
            assert "\nBefore: at the same place in the last 7 days: n0\n" in page, page
        daemons["n1"].wait_for_state(job.run_id, "ended")

        with hung_job(tmp_path / "third", daemons["n1"], drivers["n1"], nodes["n1"].inside) as job:
            assert "Before: at the same place in the last 7 days: n0, n1\n" in page_of(webhook, job)
            newest, before = incidents(daemons["n1"], "--json")["incidents"]
            assert newest["fingerprint"] == before["fingerprint"] != ""
            report = (daemons["n1"].state / "incidents" / newest["folder"] / "report.txt").read_text()
            assert "blocked at the same place 1 time in the last 7 days: n1 (1 time)" in report, report


def listed(daemon: RealDaemon, *arguments: str) -> str:
    command = [*HANGWATCH, "incidents", *arguments, "--config", str(daemon.config)]
    done = finished(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def incidents(daemon: RealDaemon, *arguments: str) -> dict[str, Any]:
    return json.loads(listed(daemon, *arguments))
