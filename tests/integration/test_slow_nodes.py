"""`hangwatch slow --nodes` through a real sshd on two nodes, each with a rank of a real torchrun job.

The clocks of the nodes are the clock of this machine. The error of each clock is written into the replies of the nodes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HANGWATCH, Finished, finished
from tests.conftest import wait_for
from tests.namespace_nodes import JobOverNodes, cluster, needs_namespaces, sshd_on
from tests.ssh_nodes import needs_sshd

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400), needs_namespaces, needs_sshd]


def test_node_with_a_late_rank_is_named_if_the_clocks_prove_it(tmp_path: Path) -> None:

    with (
        cluster(tmp_path, ("n0", "n1")) as nodes,
        sshd_on(nodes, tmp_path / "ssh") as ssh_config,
        JobOverNodes(
            tmp_path / "job", "slow_rank.py", nodes.values(), uid=0, gpu=0, run_id="pretrain", port=29540
        ) as job,
    ):

        def slow(clock_error: str, *arguments: str) -> Finished:
            remote = tmp_path / "hangwatch-there"
            written = f's/"clock_error_seconds":[^,]*/"clock_error_seconds":{clock_error}/'
            remote.write_text(f"{sys.executable} -m hangwatch \"$@\" | sed '{written}'\n")
            command = [
                *HANGWATCH,
                "slow",
                "--nodes",
                "n[0-1]",
                "--via-options",
                f"-F {ssh_config}",
            ]
            command += ["--remote-command", f"sh {remote}", *arguments]
            return finished(*command)

        def order(clock_error: str) -> dict[str, Any]:
            done = slow(clock_error, "--json")
            orders = list(json.loads(done.stdout or '{"jobs": {}}')["jobs"].values())
            return orders[0] if orders else {"reason": done.stderr}

        job.wait_for_step(60)
        (tmp_path / "job" / "slow-1").touch()
        named = wait_for(lambda: (one := order("0.00001"))["reason"] == "" and one, "a late node", 120)
        assert named["latest"] == "n1" and named["operation"] == "all_reduce" and named["records"] >= 40
        assert order("1.5")["reason"] == "WithinClockError"
        text = slow("null")
        assert text.returncode == 1 and "Not compared: n[0-1]: the clock is not synchronized" in text.stdout
        assert slow("0.00001", "--job", "other").returncode == 1
