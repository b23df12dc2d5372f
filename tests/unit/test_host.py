"""Facts of the host: read from the kernel, equal to those of psutil."""

import time

import psutil

from hangwatch import words
from hangwatch.probes.node import host


def test_facts_of_this_host_agree_with_psutil() -> None:
    facts = dict(host.read_facts("570.86.15"))

    assert facts["cpus"] == f"{psutil.cpu_count()} ({psutil.cpu_count(logical=False) or 'unknown'} cores)"
    assert facts["memory"].endswith(f" of {psutil.virtual_memory().total / 2**30:.0f} GiB available")
    assert int(facts["processes"]) > 0
    assert facts["up for"] in {words.duration(time.time() - psutil.boot_time() + late) for late in range(-60, 61)}
    assert facts["NVIDIA driver"] == "570.86.15"
    assert "NVIDIA driver" not in dict(host.read_facts(None))
