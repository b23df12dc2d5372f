"""A real hangwatch on a simulated node: real processes, real stacks, real checks. Only the GPUs are simulated."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hangwatch.checks.framework import registry
from hangwatch.daemon import Daemon
from hangwatch.tools.demo import playback
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from tests.simulated.node import SimulatedNode


@contextlib.contextmanager
def hangwatch_on(node: SimulatedNode, directory: Path, name: str = "node-1") -> Iterator[Daemon]:
    """Run the daemon with the demo's quick settings. Its check `network` is off: no job has a master."""
    checks = {check.name: check.settings() for check in registry.checks().values() if check.name != "network"}
    daemon = Daemon(
        playback.settings(directory), SimulatedGpus(node), node=name, proc_root=node.proc_root, check_settings=checks
    )
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
