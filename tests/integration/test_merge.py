"""`hangwatch merge` on folders with the incidents of many nodes, as an on-call engineer runs it. Some are broken."""

import json
import os
import sys
from pathlib import Path

from msgspec.json import encode
from msgspec.structs import replace

from hangwatch import store
from hangwatch.formats import incident_file, sighting
from hangwatch.model import (
    EnqueuedOperation,
    Group,
    Grouping,
    GroupRecords,
    Incident,
    Member,
    RecorderState,
)
from tests import samples
from tests.commands import hangwatch, refused, spawn
from tests.samples import change_parts

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
