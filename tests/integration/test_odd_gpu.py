"""A hang of ranks with the same stack, where only GPU counters differ: no kernel runs on the GPU of one rank."""

import contextlib
from functools import partial
from pathlib import Path

from hangwatch import config
from hangwatch.capture.request import GpuSources
from hangwatch.probes.gpu import query
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, sampling, uuid_of
from tests.integration import targets

PROGRAM = """
import os, socket, threading
kept = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
def meet():
    ready()
    threading.Event().wait()
meet()
"""
MEETS = (config.ActivityRule(activity="collective_wait", function="meet"),)
HANGS = ("gpu all power_watts 118", "gpu all utilization_ratio 1.0")
WAITS = ("gpu all gpm 2 12.5", "gpu all gpm 5 0", "gpu all gpm 10 0.3")


def test_rank_without_a_kernel_on_its_gpu_is_checked_first(fake_driver: FakeDriver, tmp_path: Path) -> None:
    fake_driver.add(*HANGS, *WAITS)
    with contextlib.ExitStack() as stack:
        pids = stack.enter_context(targets.started(tmp_path, *[PROGRAM] * 4))
        job = targets.job_of(pids, map(uuid_of, range(4)))
        sampler = stack.enter_context(sampling(fake_driver, sample_seconds=0.2))
        sources = GpuSources(read_sweep=sampler.latest, read_traffic=partial(query.traffic, sampler))

        def look(**settings: bool) -> Diagnosis:
            limits = config.Capture(rounds=3, pause_seconds=0.3, dump_deadline_seconds=60.0, **settings)
            return targets.diagnosed(job, limits, activity.load(MEETS), gpus=sources)

        def counted() -> Diagnosis | None:
            found = look()  # the driver may need a second for a response
            return found if all(member.gpu.use for member in found.grouping.members) else None

        alike = wait_for(counted, "what the GPUs do")
        fake_driver.add("gpu 2 gpm 2 0")
        odd, unread = wait_for(counted, "what the GPUs do"), look(counters=False)
    for one in (alike, odd, unread):
        assert (one.verdict.kind, one.verdict.named) == ("AllWaiting", ()), one.verdict.message
    assert [one.kind for one in alike.verdict.evidence if one.kind == "gpu_use"] == ["gpu_use"]
    assert alike.verdict.check_first == unread.verdict.check_first == ()
    assert [one.rank for one in odd.verdict.check_first] == [2]
    assert "its GPU runs no kernel, the others run kernels on 12.5% of their SMs" in odd.verdict.message
