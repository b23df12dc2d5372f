"""A real hangwatch on a simulated node: real processes, real stacks, real checks; only the GPUs are simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hangwatch.checks import discovery
from hangwatch.daemon import Daemon
from hangwatch.demo import play
from hangwatch.demo.node import SimulatedNode
from hangwatch.demo.power import SimulatedGpus


@contextlib.contextmanager
def hangwatch_on(node: SimulatedNode, directory: Path, name: str = "node-1") -> Iterator[Daemon]:
    """The daemon with the demo's quick settings and every check, for as long as the context lasts."""
    checks = {check.name: check.settings() for check in discovery.checks().values()}
    daemon = Daemon(
        play.settings(directory), SimulatedGpus(node), node=name, proc_root=node.proc_root, check_settings=checks
    )
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
