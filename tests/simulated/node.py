"""The simulated node of the demo, with more nodes, programs and orders."""

from __future__ import annotations

from hangwatch.tools.demo import simulated_node
from hangwatch.tools.demo.simulated_node import START_DEADLINE_SECONDS


class SimulatedNode(simulated_node.SimulatedNode):
    """A simulated node, which is the first of the `nodes` nodes of its job.

    `program` is the module that starts the ranks, `worker` the module that a rank runs. `first_order` (TARGET ORDER)
    is sent before the first step.
    """

    def __init__(
        self,
        ranks: int = 8,
        nodes: int = 1,
        program: str = "tests.simulated.launcher",
        worker: str = "tests.simulated.worker",
        first_order: str = "",
    ) -> None:
        super().__init__(ranks, program, (str(nodes), worker, first_order))

    def __enter__(self) -> SimulatedNode:
        super().__enter__()
        return self

    def restart(self) -> None:
        """Order the launcher to replace all ranks. Wait until the new ranks have joined."""
        self._write("launcher restart\n")
        self.wait_for_event("ready", START_DEADLINE_SECONDS)

    def has_said(self, event: str) -> bool:
        """True if the event has arrived. All events that have arrived so far are consumed."""
        while (words := self._next_event(0.0)) is not None:
            if words[0] == event:
                return True
        return False
