"""Facts of the host: read from the kernel, equal to those of psutil."""

import time

import psutil

from hangwatch.probes.node import host


def test_facts_of_this_host_agree_with_psutil() -> None:
    facts = dict(host.read_facts("570.86.15"))

    assert facts["cpus"] == f"{psutil.cpu_count()} ({psutil.cpu_count(logical=False) or 'unknown'} cores)"
    assert facts["memory"].endswith(f" of {psutil.virtual_memory().total / 2**30:.0f} GiB available")
    assert int(facts["processes"]) > 0
    hours = int(facts["up for"].removesuffix(" h"))
    assert abs(hours - (time.time() - psutil.boot_time()) / 3600) <= 1
    assert facts["NVIDIA driver"] == "570.86.15"
    assert "NVIDIA driver" not in dict(host.read_facts(None))
