"""Floods of the daemon's user socket.

They cost the daemon little, and another user still gets a dump. `python -m tests.soak.socket_floods` runs the whole
test and prints its figures.
"""

import pytest

from tests.integration.test_user_socket import OTHER, OWNER
from tests.other_users import needs_root
from tests.soak import socket_floods as floods

pytestmark = [needs_root, pytest.mark.timeout(300)]
USERS = [OTHER, *range(2000, 2011)]


def test_dump_is_answered_beside_twelve_users_that_flood_the_socket() -> None:
    with floods.node_with_jobs([OWNER, *USERS]) as node:
        assert floods.answered(node, OWNER, USERS, 2) == 2
        refused = [line for line in node.daemon.log.splitlines() if "are refused" in line]
        assert len({line.partition("connections of ")[2] for line in refused}) == len(refused), "once for each"


@pytest.mark.parametrize(
    ("is_unix", "mode"), [(True, "/status"), (True, "hold"), (False, "connect"), (False, "/metrics")]
)
def test_flood_costs_the_daemon_at_most_twice_its_own_cpu(is_unix: bool, mode: str) -> None:
    with floods.node_with_jobs([OWNER]) as node:
        where = str(node.socket) if is_unix else node.daemon.address
        found = floods.cost(node, OWNER, mode, where, 3.0)
        assert found.daemon <= 2.0 * found.flooder + 0.1, str(found)
