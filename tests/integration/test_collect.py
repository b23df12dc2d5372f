"""The output of many nodes through one command. Stdout and stderr of a node may arrive in any order."""

import re

from hangwatch.tools.fleet import remote_run
from hangwatch.tools.fleet.remote_run import Reply
from hangwatch.tools.fleet.transports import OneForAll

LINE = re.compile(rb"([01]): (.*)")


def labelled(line: bytes) -> tuple[str, bytes] | None:
    found = LINE.fullmatch(line)
    return (found[1].decode(), found[2]) if found else None


def test_a_complaint_that_comes_before_its_node_has_a_name_is_kept() -> None:
    """Keep the stderr of a node if it arrives before the stdout: srun sends each over a separate connection."""
    late = (
        "echo '1: early' >&2; echo '7: unknown' >&2; sleep 0.3; printf '0: a\\n1: b\\n0: {}\\n1: {}\\n0: =0\\n1: =0\\n'"
    )
    transport = OneForAll(["sh", "-c", late], labelled, lambda _: None, names_itself=True)
    replies: list[Reply] = []
    complaints = remote_run.run_on_nodes(["a", "b"], transport, deadline_seconds=60, on_reply=replies.append)
    assert sorted((one.node, one.output, one.is_late) for one in replies) == [("a", b"{}", False), ("b", b"{}", False)]
    assert complaints == {"a": b"", "b": b"early\n"}
