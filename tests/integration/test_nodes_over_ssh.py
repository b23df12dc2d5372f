"""`hangwatch dump --nodes --via ssh` and `--via pdsh` through a real sshd on loopback."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.integration.test_check_nodes import answer_of
from tests.integration.test_check_nodes import keep as keep_check
from tests.integration.test_check_nodes import remote as remote_check
from tests.integration.test_dump_nodes import answer, end_while_nodes_answer, incident_of, keep, remote, running
from tests.integration.test_hostile_input import hangwatch
from tests.ssh_nodes import needs_pdsh, needs_sshd, sshd

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with sshd(tmp_path_factory.mktemp("ssh") / "d", [f"n{number}" for number in range(5)]) as found:
        yield found


@pytest.fixture
def nodes(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the nodes' output. On n4 hangwatch is missing, on n3 it hangs."""
    monkeypatch.setenv("PDSH_SSH_ARGS", f"-2 -a -x -F {config} %h")
    for number in range(3):
        keep(tmp_path / f"n{number}", [incident_of(range(8 * number, 8 * number + 8))])
    remote(
        tmp_path,
        f"""port=${{SSH_CONNECTION##* }}
node=$(cat {config.parent}/$port)
case $node in n3) exec sleep 600;; n4) exec /nonexistent/hangwatch;; esac
echo up >"$folder/up-$node"
echo >&2 "it's $node's own"' shell: $HOME'
print""",
    )
    return tmp_path


VIA = {
    "ssh": lambda config: ("--via", "ssh", "--via-options", f"-F {config}"),
    "pdsh": lambda config: ("--via", "pdsh", "--via-options", "-R ssh"),
}


@pytest.mark.parametrize("via", ["ssh", pytest.param("pdsh", marks=needs_pdsh)])
def test_nodes_behind_a_real_sshd(via: str, nodes: Path, config: Path) -> None:
    command = ("--deadline", "25", "--remote-command", f"sh {nodes}/answer", "--json")
    done = hangwatch("dump", "--nodes", "n[0-4],unreached", *VIA[via](config), *command)
    told = answer(done)
    assert told["answered"] == ["n0", "n1", "n2"], done.stderr
    assert told["unanswered"] == ["n3", "unreached"]
    (failed,) = told["failed"]  # type: ignore[misc]
    assert (failed["nodes"], "--remote-command" in failed["reason"]) == (["n4"], True)
    (job,) = told["jobs"]  # type: ignore[misc]
    assert "rank 19 (n2" in job["verdict"]["message"]
    assert "n0: it's n0's own shell: $HOME" in done.stderr
    assert "unreached: ssh: connect to host 127.0.0.1" in done.stderr
    wait_for(lambda: not running(nodes), "an end of the node that hung")


@pytest.mark.parametrize("via", ["ssh", pytest.param("pdsh", marks=needs_pdsh)])
def test_checks_behind_a_real_sshd(via: str, nodes: Path, config: Path) -> None:
    for node in ("n0", "n1", "n2"):
        keep_check(nodes, node, answer_of(driver="535.1" if node == "n2" else "550.54"))
    remote_check(nodes, f"port=${{SSH_CONNECTION##* }}; node=$(cat {config.parent}/$port); echo Welcome; print")
    done = hangwatch("check", "--nodes", "n[0-2]", *VIA[via](config), "--remote-command", f"sh {nodes}/answer")
    assert "n2: Differs: driver 550.54 on n[0-1], 535.1 on n2" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("via", "ending"),
    [
        ("ssh", signal.SIGINT),
        ("ssh", signal.SIGKILL),
        pytest.param("pdsh", signal.SIGINT, marks=needs_pdsh),  # after our end a pdsh remains until the deadline
    ],
)
def test_when_we_end_so_does_what_runs_behind_sshd(via: str, ending: signal.Signals, nodes: Path, config: Path) -> None:
    remote(nodes, 'echo up >"$folder/up-$$"; exec sh -c "sleep 600; true" "$folder"')
    end_while_nodes_answer(nodes, ending, "--nodes", "n[0-1]", *VIA[via](config), count=2)
