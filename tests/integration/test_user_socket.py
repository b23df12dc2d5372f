"""The user socket: users query the daemon about their own jobs. It never returns data of other users."""

import json
import os
import random
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.cli import user_socket_client
from hangwatch.cli.user_socket_client import SocketError
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import FEEDBACK_FILE
from hangwatch.store import Store
from hangwatch.web.listener import Answer, Listener, Request, text
from tests import samples
from tests.commands import HANGWATCH, Finished, finished, first_line, rank_environ, spawn
from tests.conftest import open_folder, wait_for
from tests.integration import targets
from tests.other_users import as_user, needs_mounts, needs_root
from tests.real_daemon import RealDaemon

pytestmark = needs_root

# Unused uids: the machine may have jobs of any user.
OWNER, OTHER, STRANGER = random.sample(range(1 << 20, 1 << 30), 3)
# With yama, a user cannot read /proc/PID/mem of their own process, but can read /proc/PID/environ.
CLOSED = 'file=$1 pid=$2; shift 2; mount --bind "$file" "/proc/$pid/mem"; exec "$@"'


class Node(NamedTuple):
    daemon: RealDaemon
    socket: Path
    pids: dict[int, int]

    def hangwatch(
        self, uid: int, *arguments: str, prefix: tuple[str, ...] = (), groups: tuple[int, ...] = ()
    ) -> Finished:
        """Run a hangwatch command as this user. Its configuration names the user socket."""
        config = self.daemon.folder / "user.toml"
        config.write_text(
            f'[store]\ndirectory = "{self.daemon.state}"\n[http]\nport = 1\n[socket]\npath = "{self.socket}"\n'
        )
        command = [*prefix, *as_user(uid, groups=groups), *HANGWATCH, *arguments, "--config", str(config)]
        return finished(*command, cwd="/")

    def get(self, uid: int, what: str) -> tuple[int, str]:
        """Send a request as this user. Return the status and the text of the response."""
        code = f"""
import http.client, socket
http.client.HTTPConnection.connect = lambda self: self.sock.connect({str(self.socket)!r})
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.connect()
connection.request("GET", {what!r})
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
        done = finished(*as_user(uid), sys.executable, "-c", code, check=True)
        status, _, words = done.stdout.partition(" ")
        return int(status), words


def names_of(status: Any) -> set[str]:
    """Return the names of the jobs of these tests. Other jobs may run on the machine."""
    return {job["job_id"] for job in status["jobs"]}


@contextmanager
def node_with_jobs(
    uids: Sequence[int], per_minute: int = 60, per_minute_of_owner: int = 40, **sections: Mapping[str, object]
) -> Iterator[Node]:
    """Run a real daemon with a user socket, and a job of one rank for each user."""
    pids = {}
    with ExitStack() as stack:
        folder = stack.enter_context(open_folder())
        path = folder / "run" / "socket"
        path.parent.mkdir()
        for uid in uids:
            own = folder / str(uid)
            own.mkdir()
            pids[uid] = stack.enter_context(targets.rank_of_user(uid, own, f"job-of-{uid}"))
        environ = {**os.environ, "LD_LIBRARY_PATH": ""}
        limits = {"path": str(path), "per_minute": per_minute, "per_minute_of_owner": per_minute_of_owner}
        daemon = stack.enter_context(RealDaemon(folder / "hw", environ, socket=limits, **sections))
        (folder / "hw").chmod(0o755)
        wait_for(lambda: {f"job-of-{uid}" for uid in pids} <= names_of(daemon.status()), "the jobs")
        yield Node(daemon, path, pids)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with node_with_jobs((OWNER, OTHER), 600, 600) as running:
        yield running


def test_owner_gets_stacks_that_the_kernel_does_not_let_it_read(node: Node) -> None:
    done = node.hangwatch(OWNER, "dump", "--job", f"job-of-{OWNER}", "--json", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert len(job["capture"]["ranks"][0]["rounds"]) == 2
    assert f"train_of_{OWNER}" in done.stdout
    assert f"job-of-{OTHER}" not in done.stdout and f"train_of_{OTHER}" not in done.stdout
    assert f"job job-of-{OWNER} ({job['job']['job_key']}): sent its stacks to user {OWNER}" in node.daemon.log


def test_members_of_the_store_group_give_feedback_through_the_daemon() -> None:
    with node_with_jobs((OWNER,), store={"group": str(OTHER)}) as node:
        folder = Store(node.daemon.state, config.Store(group=str(OTHER)), shared=True).save(samples.loader_hang(), {})
        given = folder / FEEDBACK_FILE

        def judge(uid: int, *arguments: str, groups: tuple[int, ...] = ()) -> Finished:
            return node.hangwatch(uid, "verdict", folder.name, *arguments, groups=groups)

        refused = judge(STRANGER, "--right")
        assert (refused.returncode, refused.stdout) == (2, "") and "type: sudo" in refused.stderr
        assert "only root and members of [store] group may give feedback on verdicts" in refused.stderr
        assert node.get(OWNER, f"/verdict?incident={folder.name}&right=1")[0] == 403
        assert not given.exists()

        done = judge(STRANGER, "--wrong", "--culprit", "2", "--cause", "a \x1b disk", groups=(OWNER, OTHER))
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{folder.name}: the verdict was wrong, the culprit is rank 2" in done.stdout
        stored = incident_file.load_feedback(folder)
        assert stored is not None and (stored.is_right, stored.by_uid) == (False, STRANGER)
        assert stored.cause == "a \\x1b disk" and stored.culprit is not None and stored.culprit.rank == 2
        assert f"feedback of user {STRANGER} on {folder.name}: the verdict was wrong" in node.daemon.log

        before = given.read_bytes()
        for query, answer in (
            ("right=1&culprit=2", "--culprit needs --wrong"),
            ("right=0&culprit=99", "the incident has no such rank"),
            ("right=0&culprit=-1", "culprit: must be a rank"),
            ("right=0&incident=../incidents", "matches no incident"),
        ):
            status, words = node.get(0, f"/verdict?incident={folder.name}&{query}")
            assert status == 400 and answer in words
        assert given.read_bytes() == before


def test_user_gets_no_data_about_jobs_of_others(node: Node) -> None:
    other = node.hangwatch(OWNER, "dump", "--job", f"job-of-{OTHER}")
    assert other.returncode == 2 and "may not read the names of other users' jobs: `sudo " in other.stderr
    other = node.hangwatch(OWNER, "dump", "--pid", str(node.pids[OTHER]))
    assert other.returncode == 1 and "; the daemon runs: `hangwatch status`" in other.stderr
    assert node.get(STRANGER, f"/dump?pid={node.pids[OTHER]}") == (404, "no such job of yours runs on this node\n\n")
    (key,) = [job["job_key"] for job in node.daemon.status()["jobs"] if job["job_id"] == f"job-of-{OTHER}"]
    assert node.get(OWNER, f"/dump?job={key}")[0] == 404
    assert node.get(OTHER, f"/dump?job={key}")[0] == 200
    seen = json.loads(node.get(OWNER, "/status")[1])
    assert names_of(seen) - {"open"} == {f"job-of-{OWNER}"}, "and the job of another test, if that ran before"
    assert not any(check["message"] for check in seen["checks"]) and f"job-of-{OTHER}" not in json.dumps(seen)
    assert {f"job-of-{uid}" for uid in node.pids} <= names_of(json.loads(node.get(0, "/status")[1]))


@needs_mounts
def test_what_may_be_found_and_not_read_is_asked_of_the_daemon(node: Node) -> None:
    """Find a job without the right to read its memory, as with kernel.yama.ptrace_scope=1."""
    closed = node.daemon.folder / "closed"
    closed.touch(mode=0o600)
    code = "ready()\nimport time\ndef train_in_the_open(): time.sleep(600)\ntrain_in_the_open()"
    folder = node.daemon.folder / "open"
    folder.mkdir()
    os.chown(folder, OWNER, OWNER)
    os.mkfifo(folder / "fifo")
    slot = [f"{name}={value}" for name, value in rank_environ("open").items()]
    program = targets._READY.format(folder=str(folder)) + code
    with spawn(*as_user(OWNER), "env", *slot, sys.executable, "-c", program) as rank:
        wait_for(lambda: (folder / "ready").exists(), "the rank")
        unshared = ("unshare", "--mount", "--propagation", "private")
        prefix = (*unshared, "sh", "-euc", CLOSED, "sh", str(closed), str(rank.pid))
        done = node.hangwatch(OWNER, "dump", "--job", "open", prefix=prefix)
        assert done.returncode == 0, done.stderr
        assert "train_in_the_open" in done.stdout and "this user may not read" not in done.stderr
        assert re.search(rf"job open \([0-9a-f]{{16}}\): sent its stacks to user {OWNER}", node.daemon.log)
        alone = node._replace(socket=node.socket.with_name("none")).hangwatch(
            OWNER, "dump", "--job", "open", prefix=prefix
        )
        assert "this user may not read all stacks; the daemon can dump your own jobs, but:" in alone.stderr
        assert "No such file or directory" in alone.stderr and "`, or install the daemon" in alone.stderr


@needs_mounts
@pytest.mark.parametrize("command", ["dump", "status"])
def test_command_without_the_socket_says_that_it_is_missing(node: Node, command: str) -> None:
    """Alone in a pid namespace, so that no other job of the machine is found."""
    alone = node._replace(socket=node.socket.with_name("none"))
    done = alone.hangwatch(STRANGER, command, prefix=("unshare", "--pid", "--fork", "--mount-proc"))
    assert done.returncode != 0
    assert f"the socket of the daemon is missing: {alone.socket}" in done.stderr
    assert "no training job" not in done.stderr


@pytest.mark.parametrize("command", [["dump", "--job", "job-of-nobody"], ["status"], ["incidents"]])
def test_command_that_the_daemon_refuses_for_now_says_so_and_exits_with_75(node: Node, command: list[str]) -> None:
    said = "connections are refused: all 128 connections are in use; try again in 10 s"

    async def answer(_: Request) -> Answer:
        return text(HTTPStatus.TOO_MANY_REQUESTS, said)

    busy = Listener("busy", answer, max_connections=16)
    path = node.socket.with_name("busy")
    busy.bind_unix(str(path))
    busy.start()
    try:
        done = node._replace(socket=path).hangwatch(OWNER, *command)
    finally:
        busy.stop()
        path.unlink()
    assert done.returncode == 75 and f"the daemon answered: {said}" in done.stderr
    assert "no such job" not in done.stderr and "Traceback" not in done.stderr


def test_user_socket_gives_incidents_and_status_without_files_and_port(node: Node) -> None:
    kept = Store(node.daemon.state, shared=True)
    found = samples.mismatch()
    names = {}
    for uid in (OWNER, OTHER):
        owned = replace(found, incident_id=f"i-{uid}", job=replace(found.job, uid=uid, job_id=f"kept-of-{uid}"))
        names[uid] = kept.save(owned, {}).name
        for path in (node.daemon.state / "incidents" / names[uid], node.daemon.state / "incidents"):
            os.removexattr(path, "system.posix_acl_access")  # as on a file system without ACLs
            path.chmod(0o700)
    listed = json.loads(node.hangwatch(OWNER, "incidents", "--json").stdout)["incidents"]
    assert [one["folder"] for one in listed] == [names[OWNER]]
    assert f"kept-of-{OWNER}" in node.hangwatch(OWNER, "report", f"kept-of-{OWNER}").stdout
    status = node.hangwatch(OWNER, "status")  # no server listens on the port of this configuration
    assert status.returncode == 0 and f"job-of-{OWNER}" in status.stdout and f"job-of-{OTHER}" not in status.stdout


def test_client_sends_nothing_to_a_socket_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(path))
        ours.listen()
        os.chown(path, OTHER, OTHER)
        with pytest.raises(SocketError, match="not a socket of root"):
            user_socket_client.ask(str(path), "/status")
    tmp_path.chmod(0o755)
    listens = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True); input()"
    with open_folder(OTHER) as folder:
        his = folder / "socket"
        with spawn(*as_user(OTHER), sys.executable, "-c", listens, his) as listening:
            first_line(listening)
            os.chown(his, 0, 0)
            with pytest.raises(SocketError, match="the listener is neither root nor the user hangwatch"):
                user_socket_client.ask(str(his), "/status")
