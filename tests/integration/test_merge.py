"""`hangwatch merge` on folders with the incidents of many nodes, as an on-call engineer runs it. Some are broken."""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.json import encode
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Gauge

from hangwatch import store
from hangwatch.formats import incident_file, sighting
from hangwatch.model import (
    INCIDENT_VERSION,
    EnqueuedOperation,
    Group,
    Grouping,
    GroupRecords,
    Incident,
    Member,
    RecorderState,
)
from hangwatch.store import Store, open_writable
from hangwatch.web.http_server import Server
from tests import samples
from tests.commands import hangwatch, refused, spawn
from tests.conftest import wait_for
from tests.integration.test_incidents_over_network import CLIENTS, SECRET, USERS
from tests.samples import change_parts
from tests.servers import RealPrometheus, answering, free_port, served

NODES = 4
WORLD = 8 * NODES


def waiting(node: int, *, late: bool = False) -> Incident:
    """Return an incident of one node: its 8 ranks have the same stack, and rank `late` has not joined."""
    group = samples.waiting(range(8 * node, 8 * node + 8), node=f"gpu-{node}")
    members = tuple(recorded(member, 6 if late and number == 3 else 7) for number, member in enumerate(group.members))
    grouping = Grouping(groups=(replace(group, members=members),), world_size=WORLD)
    changes = {"incident_id": f"i{node}", "node": f"gpu-{node}", "world_size": WORLD}
    return change_parts(samples.all_waiting(), grouping=grouping, **changes)


def recorded(member: Member, number: int) -> Member:
    opened = EnqueuedOperation(7, "all_reduce", 7, created_unix_seconds=5.0, open_seconds=60.0, stays_open=True)
    operations = (opened,) if number == 7 else ()
    group = GroupRecords(library="nccl", name="0", description="default_pg", number=number, operations=operations)
    return change_parts(member, libraries=(RecorderState(library="nccl", groups=(group,)),), receives=False)


def own_code(group: Group, rank: int) -> tuple[Group, ...]:
    """Split the group in two: one rank, which is in its own code, and the other ranks."""
    alone = samples.own_code().grouping.groups[-1]
    (member,) = (member for member in group.members if member.id.rank == rank)
    rest = tuple(one for one in group.members if one is not member)
    return replace(group, members=rest), replace(alone, waits_for="nothing", members=(member,))


def nodes() -> list[Incident]:
    """Return the incidents of all nodes. Rank 19, on the third, has not joined, which none shows alone."""
    found = [waiting(node, late=node == 2) for node in range(NODES)]
    (group,) = found[2].grouping.groups
    found[2] = replace(found[2], grouping=replace(found[2].grouping, groups=own_code(group, 19)))
    return found


def keep(folder: Path, incidents: list[Incident]) -> None:
    for incident in incidents:
        store.open_writable(folder / incident.node).save(incident, {})


def test_a_folder_of_nodes_gives_one_verdict_by_their_recorders(tmp_path: Path) -> None:
    keep(tmp_path, nodes())
    done = hangwatch("merge", "--json", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["verdict"]["kind"] == "NotJoined"
    assert [rank["rank"] for rank in answer["verdict"]["named"]] == [19]
    assert (answer["world_size"], answer["absent"]) == (WORLD, [])
    alone = json.loads(hangwatch("merge", "--json", str(tmp_path / "gpu-0")).stdout)
    assert alone["verdict"]["named"] == []


def test_one_bad_file_of_many_is_said_and_the_rest_counts(tmp_path: Path) -> None:
    keep(tmp_path, [waiting(node) for node in range(NODES)])
    (broken,) = (tmp_path / "gpu-1").rglob("incident.json")
    broken.write_bytes(broken.read_bytes()[:-200])
    os.mkfifo(tmp_path / "gpu-9.json")
    (tmp_path / "gpu-8.json").symlink_to(broken)
    newer = replace(waiting(3), schema_version=99, hangwatch_version="9.0")
    (tmp_path / "newer.json").write_bytes(incident_file.encode(newer))
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(incident_file.MAX_INCIDENT_BYTES + 1)
    page = tmp_path / "page.html"
    done = hangwatch("merge", "--html", str(page), str(tmp_path))
    assert done.returncode == 1
    assert "No response  8 ranks: 8-15" in done.stdout
    assert "24 of 32 seen" in done.stdout
    for said in (
        f"{broken}: is truncated",
        "gpu-9.json: is not a regular file",
        "gpu-8.json: cannot be read",
        "9.0",
        "huge.json",
    ):
        assert said in done.stderr
    assert done.stderr.count("skipped: ") == 5
    assert "<html" in page.read_text()


def test_where_nothing_is_left_it_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    refused("merge", str(tmp_path), says="a.json")
    (tmp_path / "a.json").unlink()
    refused("merge", str(tmp_path), says="has no incident")
    os.mkfifo(tmp_path / "b")
    refused("merge", str(tmp_path / "b"), says="is not a regular file")


def test_of_several_jobs_one_is_chosen_or_all_are_meant(tmp_path: Path) -> None:
    nodes = [waiting(node) for node in range(NODES)]
    theirs = change_parts(nodes[1], job_key="0123456789abcdef", owner="uid 1002")
    keep(tmp_path, [nodes[0], theirs, nodes[2], nodes[3]])
    refused("merge", str(tmp_path), says="(uid 1002, key 0123456789abcdef)")
    refused("merge", str(tmp_path), says="--as-one-job")
    refused("merge", "--job", "nonsense", str(tmp_path), says="no incident of this job")
    chosen = json.loads(hangwatch("merge", "--json", "--job", nodes[0].job.job_key, str(tmp_path)).stdout)
    assert chosen["absent"] == [[8, 15]]
    mixed = json.loads(hangwatch("merge", "--json", "--as-one-job", str(tmp_path)).stdout)
    assert mixed["absent"] == []


def test_a_job_is_chosen_by_the_name_that_the_page_prints(tmp_path: Path) -> None:
    nodes = [waiting(node) for node in range(NODES)]
    others = [change_parts(one, job_id="9", job_key="k9", job_name="olmo-7b") for one in nodes[1:]]
    keep(tmp_path, [nodes[0], *others])
    assert nodes[0].job.job_name == "llama-70b"
    chosen = json.loads(hangwatch("merge", "--json", "--job", "olmo-7b", str(tmp_path)).stdout)
    assert (chosen["job"]["job_key"], chosen["absent"]) == ("k9", [[0, 7]])
    refused("merge", "--job", "7b", str(tmp_path), says="no incident of this job")


def test_the_newest_incident_of_a_node_counts_and_it_is_said(tmp_path: Path) -> None:
    new = waiting(0)
    old = replace(waiting(1), node="gpu-0", opened_unix_seconds=new.opened_unix_seconds - 60, incident_id="old")
    keep(tmp_path, [new, waiting(1), old])
    done = hangwatch("merge", str(tmp_path))
    assert "1 older incident of gpu-0 ignored" in done.stdout


def test_what_nodes_print_is_merged_from_standard_input_and_files(tmp_path: Path) -> None:
    grouped = sighting.make_grouped_dump("gpu-0", [waiting(0)], 1.0)
    path = tmp_path / "anything"
    path.write_bytes(encode(grouped))
    done = hangwatch("merge", "--json", "-", stdin=path.read_text())
    assert json.loads(done.stdout) == json.loads(hangwatch("merge", "--json", str(path)).stdout)
    assert json.loads(done.stdout)["absent"] == [[8, 31]]


def test_a_name_of_a_node_is_no_set_of_nodes(tmp_path: Path) -> None:
    """Do not expand the name of a node, although ClusterShell could read it as a set or a group of nodes."""
    strange = [replace(waiting(node), node=name) for node, name in enumerate(["a[0-99999999]", "@*"])]
    for number, incident in enumerate(strange):
        ids = (replace(member.id, node=incident.node) for member in incident.grouping.members)
        moved = incident.grouping.change_members(lambda _, member, ids=ids: replace(member, id=next(ids)))  # type: ignore[misc]
        grouped = replace(incident, grouping=moved)
        (tmp_path / f"{number}.json").write_bytes(incident_file.encode(grouped))
    done = hangwatch("merge", "--html", str(tmp_path / "page.html"), str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_dump_grouped_is_what_merge_reads(tmp_path: Path) -> None:
    with spawn(sys.executable, "-c", "import time; time.sleep(600)") as target:
        done = hangwatch("dump", "--pid", str(target.pid), "--grouped")
    assert done.returncode == 0, done.stderr
    dumped = json.loads(done.stdout)
    assert "captures" not in dumped["jobs"][0]
    assert dumped["printed_unix_seconds"] > dumped["jobs"][0]["opened_unix_seconds"] > 0
    path = tmp_path / "node.json"
    path.write_text(done.stdout)
    merged = json.loads(hangwatch("merge", "--json", str(path)).stdout)
    assert merged["groups"][0]["members"][0]["pid"] == target.pid


TOKEN = "0123456789abcdef"


@contextlib.contextmanager
def daemons(folder: Path, incidents: list[Incident], **settings: object) -> Iterator[list[tuple[int, Server]]]:
    """Yield port and server of a daemon for each incident, which alone is in its store. Its metrics name the job."""
    with contextlib.ExitStack() as running:
        servers = []
        for number, incident in enumerate(incidents):
            open_writable(folder / str(number)).save(incident, {})
            registry = CollectorRegistry()
            info = Gauge("hangwatch_job_info", "who", ["job_id", "job_key", "name"], registry=registry)
            info.labels(incident.job.job_id, incident.job.key, incident.job.job_name).set(1)
            kept = Store(folder / str(number))
            servers.append(running.enter_context(served(registry=registry, incidents=kept, **settings)))
        yield servers


def write_token(folder: Path) -> tuple[str, str]:
    """Write a token and the HTTP configuration of a client with it. Return their paths."""
    (folder / "token").write_text(TOKEN)
    (folder / "http.yml").write_text("authorization:\n  credentials_file: token\n")
    return str(folder / "token"), str(folder / "http.yml")


def respond_with(body: bytes, status: str = "200 OK", headers: str = "") -> Callable[[socket.socket], None]:
    return lambda one: one.sendall(f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def write_credentials(pki: Path, authority: str = "ca", shown: str = "admin", password: str = "password") -> str:
    """Write a file with the credentials of a client: authority, shown certificate, password. Return its path."""
    path = pki / f"{authority}-{shown}-{password}.yml"
    (pki / "password").write_text(f"{SECRET}\n")
    (pki / "wrong").write_text("wrong\n")
    path.write_text(
        f"basic_auth:\n  username: alice\n  password_file: {password}\ntls_config:\n  ca_file: {authority}.pem\n"
        + (f"  cert_file: {shown}.pem\n  key_file: {shown}-key.pem\n" if shown else "")
    )
    return str(path)


def test_merge_over_tls_gives_a_verdict_only_with_valid_credentials(tmp_path: Path, pki: Path) -> None:
    (pki / "web.yml").write_text(CLIENTS + USERS)
    with daemons(tmp_path, nodes(), web_config_file=str(pki / "web.yml")) as servers:
        urls = [f"https://127.0.0.1:{port}" for port, _ in servers]
        done = hangwatch("merge", "--json", "--http-config", write_credentials(pki), *urls)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["verdict"]["kind"], answer["absent"]) == ("NotJoined", [])
        (named,) = answer["verdict"]["named"]
        assert (named["rank"], named["node"]) == (19, f"127.0.0.1:{servers[2][0]}")
        assert SECRET not in done.stderr + done.stdout
        for case, says in (
            (write_credentials(pki, password="wrong"), "requires credentials: --http-config"),
            (write_credentials(pki, authority="other"), "its certificate is not trusted"),
            (write_credentials(pki, shown="stranger"), "closed the connection"),
            (write_credentials(pki, shown=""), "closed the connection"),
        ):
            told = hangwatch("merge", "--http-config", case, urls[0])
            assert told.returncode == 2, (case, told.stderr)
            assert says in told.stderr or "TLS failed" in told.stderr, (case, told.stderr)
            assert "no node returned an incident" in told.stderr


def test_nodes_that_are_silent_strange_or_hostile_cost_themselves_alone(tmp_path: Path) -> None:
    endless = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not endless.wait(0.2):
            connection.sendall(b"X: y\r\n")

    lines = [
        b'{"schema_version":%d,"incidents":[' % INCIDENT_VERSION,
        b'{"folder":"i","size_bytes":1,"state":"hung","opened_unix_seconds":1},',
    ]
    with contextlib.ExitStack() as running:
        token, http_config = write_token(tmp_path)
        servers = running.enter_context(daemons(tmp_path, nodes()[:3], incidents_token_file=token))
        elsewhere, came_elsewhere = running.enter_context(answering(respond_with(b"{}")))
        hostile = {
            "returned a redirect": respond_with(
                b"", "302 Found", f"Location: http://127.0.0.1:{elsewhere}/incidents\r\n"
            ),
            "returned no list of incidents": respond_with(b"<html>"),
            "or sent more than 4 MiB": respond_with(b"[" * (5 << 20)),
            "returned an error (HTTP 500)": respond_with(b"", "500 Oops"),
            "has no such incident": respond_with(b"", "404 Not Found"),
            "sent too many headers": lambda one: one.sendall(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000),
            "too many headers: is it a hangwatch daemon?": respond_with(b"", "200 " + "O" * 200_000),
            "closed the connection": lambda one: one.sendall(b"HTTP/9.9 garbage\r\n\r\n"),
            "truncated or not an incident": respond_with(lines[0] + lines[1][:-1] + b"]}"),
        }
        ports = {says: running.enter_context(answering(answer))[0] for says, answer in hostile.items()}
        slow, _ = running.enter_context(answering(drip))
        running.callback(endless.set)
        closed = free_port()
        urls = [
            f"http://127.0.0.1:{number}" for number in (*(port for port, _ in servers), *ports.values(), slow, closed)
        ]
        done = hangwatch("merge", "--json", "--http-config", http_config, "--deadline", "15", *urls)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert [rank["rank"] for rank in answer["verdict"]["named"]] == [19]
    assert answer["absent"] == [[24, 31]]
    told = {one["kind"]: one["message"] for one in answer["verdict"]["evidence"]}
    assert "no response from 2 nodes" in told["unanswered_nodes"]
    for silent in (slow, closed):
        assert f"{silent}" in told["unanswered_nodes"]
    for says, number in ports.items():
        lines_of = [line for line in done.stderr.splitlines() if str(number) in line]
        assert any(says in line for line in lines_of), (says, lines_of)
    assert came_elsewhere == []
    assert TOKEN not in done.stderr


def test_one_incident_of_a_node_and_one_job_of_several(tmp_path: Path) -> None:
    old, new = waiting(0), waiting(1)
    old = replace(old, opened_unix_seconds=new.opened_unix_seconds - 60, incident_id="old", node="gpu-1")
    theirs = change_parts(waiting(2), job_key="theirs", job_id="other", node="gpu-1", incident_id="i9")
    token, http_config = write_token(tmp_path)
    merge = ("merge", "--http-config", http_config)
    with daemons(tmp_path, [old], incidents_token_file=token) as ((port, _),):
        kept = open_writable(tmp_path / "0")
        url = f"http://127.0.0.1:{port}"
        named = kept.summaries()[0].folder
        for incident in (new, theirs):
            kept.save(incident, {})
        done = hangwatch(*merge, "--json", f"{url}/incidents/{named}")
        assert json.loads(done.stdout)["groups"][0]["members"][0]["rank"] == 0
        refused(*merge, url, says="these incidents are of several jobs")
        chosen = json.loads(hangwatch(*merge, "--json", "--job", "other", url).stdout)
        assert chosen["groups"][0]["members"][0]["rank"] == 16
        refused(*merge, "--job", "nobody", url, says="no job found in")
        refused(*merge, f"{url}/incidents/{named}", str(tmp_path / "0"), says="these incidents are of several jobs")


def test_status_sends_credentials_and_follows_no_redirect(tmp_path: Path, pki: Path) -> None:
    told = tmp_path / "hangwatch.toml"
    (pki / "web.yml").write_text(CLIENTS + USERS)
    with daemons(tmp_path, nodes()[:1], web_config_file=str(pki / "web.yml")) as ((port, _),):
        told.write_text(f'[http]\nlisten = "127.0.0.1"\nport = {port}\nweb_config_file = "{pki}/web.yml"\n')
        asked = ("status", "--json", "--config", str(told))
        assert hangwatch(*asked, "--http-config", write_credentials(pki)).stdout == "null\n"
        refused(*asked, "--http-config", write_credentials(pki, password="wrong"), says="it requires credentials")
        refused(*asked, "--http-config", write_credentials(pki, authority="other"), says="certificate verify failed")
    with (
        answering(respond_with(b"null")) as (elsewhere, came),
        answering(respond_with(b"", "302 Found", f"Location: http://127.0.0.1:{elsewhere}/status\r\n")) as (number, _),
    ):
        refused("status", "--url", f"http://127.0.0.1:{number}", says="refused the request: HTTP 302")
    assert came == []


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "http.yml").write_text("a: 1\n")
    refused("merge", "https://alice:secret@127.0.0.1:1", says="a URL contains a password")
    refused(
        "merge", "--http-config", str(tmp_path / "http.yml"), "http://127.0.0.1:1", says="http.yml:1: a: is not a key"
    )


def test_prometheus_knows_the_nodes_of_a_job_also_one_that_is_gone(tmp_path: Path) -> None:
    token, http_config = write_token(tmp_path)
    incidents = [change_parts(one, job_name="llama-70b") for one in nodes()]
    theirs = change_parts(waiting(3), job_id="other", job_key="theirs", job_name="other")
    with daemons(tmp_path, [*incidents, theirs], incidents_token_file=token) as servers:
        targets = {f"gpu-{number}": f"127.0.0.1:{port}" for number, (port, _) in enumerate(servers)}
        with RealPrometheus(tmp_path / "prom", targets) as prometheus:
            wait_for(lambda: len(prometheus.query("hangwatch_job_info")) == len(servers), "all to be scraped")
            servers[0][1].stop()
            asked = ["merge", "--json", "--prometheus", prometheus.url, "--http-config", http_config]
            done = hangwatch(*asked, "--job", incidents[0].job.job_id)
            by_name = hangwatch(*asked, "--job", "llama-70b")
            unknown = hangwatch(*asked, "--job", "no-such-job")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert by_name.returncode == 1, by_name.stderr
    assert json.loads(by_name.stdout)["verdict"]["named"] == answer["verdict"]["named"], "as a page calls it"
    assert [(rank["rank"], rank["node"]) for rank in answer["verdict"]["named"]] == [(19, "gpu-2")]
    assert answer["absent"] == [[0, 7]]
    (silent,) = [one["message"] for one in answer["verdict"]["evidence"] if one["kind"] == "unanswered_nodes"]
    assert "no response from 1 node (gpu-0)" in silent
    assert unknown.returncode == 2
    assert "has no job 'no-such-job' in the last 1h" in unknown.stderr


def test_a_prometheus_that_is_none_or_away_is_told() -> None:
    refused("merge", "--prometheus", f"http://127.0.0.1:{free_port()}", "--job", "x", says="did not respond")
    with answering(respond_with(b"<html>")) as (number, _):
        refused("merge", "--prometheus", f"http://127.0.0.1:{number}", "--job", "x", says="as Prometheus does")
