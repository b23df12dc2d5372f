"""From a blocked rank to its page, with a real daemon, torchrun, Prometheus and Alertmanager. One page is sent."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import QUICK, RealDaemon, TorchJob, stop_at_shard
from tests.servers import RealAlertmanager, RealPrometheus, WebhookReceiver, free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
HUNG_POWER = ["gpu all power_watts 118", "gpu 2 power_watts 86", "gpu 2 utilization_ratio 0"]
HOLD_SECONDS = QUICK["detector"]["hold_seconds"]


def alertmanager_config(webhook: str) -> dict[str, object]:
    """Return the routes and inhibitions of the example, with a path for each receiver."""
    config = yaml.safe_load((DEPLOY / "alertmanager.example.yaml").read_text())
    config["receivers"] = [
        {"name": one["name"], "webhook_configs": [{"url": f"{webhook}/{one['name']}", "send_resolved": True}]}
        for one in config["receivers"]
    ]
    return config


def paging_prometheus(
    folder: Path, daemons: Mapping[str, RealDaemon], alertmanager: RealAlertmanager
) -> RealPrometheus:
    return RealPrometheus(
        folder / "prom",
        {name: daemon.address for name, daemon in daemons.items()},
        rules=[DEPLOY / "hangwatch.rules.yaml"],
        alertmanager=alertmanager.address,
        scrape_seconds=4.0,  # also the limit of a scrape: a node may get no core for a second
    )


def test_one_page_names_the_job_and_the_rank_and_resolves(
    fake_driver: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # long: one life of an alert, in its order
    fake_driver.write(h100(4))
    os.mkfifo(tmp_path / "shard")
    with (
        WebhookReceiver() as webhook,
        RealDaemon(tmp_path / "hw", fake_driver.environ, http={"external_url": "http://{node}:9836"}) as daemon,
        RealAlertmanager(tmp_path / "am", alertmanager_config(webhook.url)) as alertmanager,
        paging_prometheus(tmp_path, {"gpu-node-1": daemon}, alertmanager) as prometheus,
        TorchJob(tmp_path, "stuck_on_a_fifo.py") as job,
    ):
        job.wait_for_step(3)
        daemon.wait_for_state(job.run_id, "training")
        wait_for(
            lambda: prometheus.query(f'hangwatch_job_state{{job_id="{job.run_id}",state="training"}} == 1'),
            "Prometheus to see the job train",
        )
        assert _pages(webhook, job.run_id) == []

        stop_at_shard(tmp_path)
        fake_driver.add(*HUNG_POWER)
        stuck_at = time.time()
        daemon.wait_for_state(job.run_id, "hung")
        hung_at = time.time()
        wait_for(
            lambda: prometheus.query(f'hangwatch_job_state{{job_id="{job.run_id}",state="hung"}} == 1'),
            "Prometheus to see the hang",
        )
        scraped_at = time.time()
        wait_for(lambda: job.run_id in [one["labels"].get("job_id") for one in prometheus.alerts()], "the alert", 60)
        fired_at = time.time()
        (page,) = wait_for(lambda: _pages(webhook, job.run_id), "the page", 60)
        paged_at = page["received_unix_seconds"]

        assert page["status"] == "firing"
        assert page["groupLabels"]["job_id"] == job.run_id
        (alert,) = page["alerts"]
        assert alert["labels"]["job_key"] == page["groupLabels"]["job_key"] != ""
        assert alert["labels"]["alertname"] == "HangwatchTrainingHung"
        said = alert["annotations"]["summary"] + alert["annotations"]["description"]
        assert job.run_id in said
        assert f"(uid {os.getuid()}, " in said and "stuck_on_a_fifo.py)" in said
        assert "rank 2" in said.lower()
        assert "gpu-node-1" in said
        assert "hangwatch report" in said
        assert not alert["annotations"].get("incident_url"), "incidents are not served over the network: no link"

        (tmp_path / "shard").write_bytes(b"shard")
        fake_driver.write(h100(4))
        daemon.wait_for_state(job.run_id, "recovered")
        resolved = wait_for(lambda: _pages(webhook, job.run_id)[1:], "the page to resolve", 120)
        assert [one["status"] for one in resolved] == ["resolved"]
        assert len(_pages(webhook, job.run_id)) == 2, "one page, one resolution, and nothing else"

    capture_seconds = hung_at - stuck_at - HOLD_SECONDS
    with capsys.disabled():
        print(
            f"\nfrom stuck to page {paged_at - stuck_at:.1f} s: hold {HOLD_SECONDS:.1f}, sampling and capture "
            f"{capture_seconds:.1f}, scrape {scraped_at - hung_at:.1f}, rule {fired_at - scraped_at:.1f}, "
            f"notification {max(0.0, paged_at - fired_at):.1f}"
        )


def test_daemon_killed_twice_in_hang_makes_one_page_of_one_incident(fake_driver: FakeDriver, tmp_path: Path) -> None:
    fake_driver.write(h100(4))
    os.mkfifo(tmp_path / "shard")
    with (
        WebhookReceiver() as webhook,
        RealAlertmanager(tmp_path / "am", alertmanager_config(webhook.url)) as alertmanager,
        TorchJob(tmp_path, "stuck_on_a_fifo.py") as job,
        contextlib.ExitStack() as served,
    ):
        ports = {"port": free_port(), "health_port": free_port()}  # kept while it is down
        daemon = served.enter_context(RealDaemon(tmp_path / "hw0", fake_driver.environ, http=ports))
        prometheus = served.enter_context(paging_prometheus(tmp_path, {"gpu-node-1": daemon}, alertmanager))
        job.wait_for_step(3)
        daemon.wait_for_state(job.run_id, "training")
        stop_at_shard(tmp_path)
        fake_driver.add(*HUNG_POWER)
        wait_for(lambda: _pages(webhook, job.run_id), "the page", 120)
        (incident,) = daemon.samples("hangwatch_incident_info", job_id=job.run_id)
        kept = {"directory": str(daemon.state)}

        for times in (1, 2):
            daemon.process.kill()
            daemon.process.wait()
            wait_for(lambda: prometheus.query('up{job="hangwatch"} == 0'), "Prometheus to miss it")
            daemon = served.enter_context(
                RealDaemon(tmp_path / f"hw{times}", fake_driver.environ, store=kept, http=ports)
            )
            daemon.wait_for_state(job.run_id, "hung", 60)
        wait_for(
            lambda: prometheus.query('(time() - process_start_time_seconds{job="hangwatch"}) > 75'),
            "the time to pass for which the rules bear with a restart",
            120,
        )
        (page,) = _pages(webhook, job.run_id)
        assert page["status"] == "firing"
        info = daemon.samples("hangwatch_incident_info", job_id=job.run_id)
        assert [row["incident"] for row, _ in info] == [incident[0]["incident"]]
        folders = Path(kept["directory"], "incidents").glob(f"*-{job.run_id}-*")  # other jobs run on this machine
        assert [folder.name for folder in folders] == [incident[0]["incident"]]

        (tmp_path / "shard").write_bytes(b"shard")
        fake_driver.write(h100(4))
        daemon.wait_for_state(job.run_id, "recovered")
        wait_for(lambda: len(_pages(webhook, job.run_id)) > 1, "the page to resolve", 120)
        assert [one["status"] for one in _pages(webhook, job.run_id)] == ["firing", "resolved"]


def _pages(webhook: WebhookReceiver, job_id: str) -> list[dict[str, Any]]:
    """Return the notifications to the on-call engineer about this job. Other jobs may run on the machine."""
    return [one for one in webhook.received("/on-call") if one["groupLabels"]["job_id"] == job_id]
