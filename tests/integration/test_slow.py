"""`hangwatch slow` from the answer of a daemon: what it says of each job, and its exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from hangwatch.cli.slow import slow
from hangwatch.config import Http
from hangwatch.model import JobName, JobState
from hangwatch.state.status import CheckLine, JobStatus
from hangwatch.state.unseen import RECORDER, Unseen
from hangwatch.web.http_server import Server
from tests import samples
from tests.integration.test_top import SEEN, job

TRAINS = JobState.TRAINING
OFF = Unseen(
    job=JobName(job_id="off", job_key="off"), source=RECORDER, reason="RecorderOff", detail="it is off", ranks=2
)
LEVEL = replace(samples.arrival(), is_named=False, reason="NoneLate", message="No rank is late.")


@contextmanager
def served(jobs: tuple[JobStatus, ...], check: CheckLine) -> Iterator[str]:
    """Serve /status with these jobs and this check; yield the URL."""
    status = replace(SEEN, jobs=jobs, checks=(check,), unseen=(OFF,))
    http = Http(listen="127.0.0.1", port=0, health_port=0)
    server = Server(http, CollectorRegistry(), status=lambda: status, unhealthy=lambda: None)
    try:
        yield f"http://127.0.0.1:{server.start()}"
    finally:
        server.stop()


def run(*jobs: JobStatus, check: str = "OK") -> Result:
    with served(jobs, CheckLine("gpu_speed", check, "GpuSlow", "GPU 3 has run at 1,200 MHz")) as url:
        return CliRunner().invoke(slow, ["--url", url], standalone_mode=False)


def test_late_rank_is_shown_with_its_table() -> None:
    done = run(job("late", TRAINS, arrival=samples.arrival()))
    assert done.return_value == 0
    assert "job late (late): Rank 7 (pid 41207) is late by 4 ms" in done.output
    assert "7\t41207\t4 ms\t10.0%\n6\t41206\t-1 ms\t-2.5%\n" in done.output


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (job("j", TRAINS, arrival=LEVEL), "No rank is late."),
        (job("j", TRAINS, ranks=1), "it has only one rank here; compare its nodes: hangwatch slow --nodes NODES"),
        (job("off", TRAINS), "not known: RecorderOff: it is off"),
        (job("j", TRAINS), "not known: its collectives have not been read yet"),
    ],
)
def test_why_no_rank_is_named_is_said(shown: JobStatus, text: str) -> None:
    done = run(shown)
    assert done.return_value == 1 and f"job {shown.job_id} ({shown.job_id}): {text}" in done.output


@pytest.mark.parametrize(("check", "count"), [("WARNING", 1), ("OK", 0)])
def test_slow_gpu_is_said_beside_the_ranks(check: str, count: int) -> None:
    assert run(job("j", TRAINS), check=check).output.count("check gpu_speed: GPU 3 has run at 1,200 MHz") == count
