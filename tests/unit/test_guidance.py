"""The next step of a verdict without a named rank: a check of the resource that the ranks wait for.

Network links are checked only if all ranks wait.
"""

from collections.abc import Callable

import pytest

from hangwatch.model import Awaited, Fault, FileLock, Group, Grouping, Member, PortUse, RankId, Store, Waits
from hangwatch.stacks import activity
from hangwatch.verdict.judge import judge
from hangwatch.verdict.wording.guidance import where_to_look

LINKS = "Check for XIDs, NVLink and network errors"


def group(name: str, *members: Member, first: int = 0, count: int = 2, waits_for: str = "") -> Group:
    ranks = members or tuple(Member(id=RankId(node="n1", rank=first + i)) for i in range(count))
    known = activity.find_activity(name)
    return Group(key=f"{name}{first}", activity=name, members=ranks, waits_for=waits_for or known.waits_for)


def look(*groups: Group, world_size: int | None = None) -> str:
    return where_to_look(Grouping(groups=groups, world_size=world_size))


def at_store(*uses: PortUse) -> Group:
    members = (Member(id=RankId(rank=i), waits=Waits(store=Store("10.0.0.1:29500", use))) for i, use in enumerate(uses))
    return group("rendezvous", *members)


def member(waits: Waits = Waits()) -> Member:  # noqa: B008 - frozen
    return Member(id=RankId(rank=0), waits=waits)


MEASURED = {
    "a lock with a known holder": group(
        "lock", member(waits=Waits(file_lock=FileLock("/data/a.lock", 4711, "python")))
    ),
    "a lock with an unknown holder": group("lock", member(waits=Waits(file_lock=FileLock("/data/a.lock")))),
    "a peer outside the job": group("network", member(waits=Waits(awaited=Awaited("10.0.0.7 port 8000")))),
    "a peer that is gone": group("network", member(waits=Waits(awaited=Awaited("10.0.0.7 port 8000", "lost")))),
    "a store that rank 0 serves": at_store("serving", "connected", "connected"),
    "a store on another node": at_store("connected", "connected"),
    "a store that does not answer": at_store("silent", "silent", "connected"),
    "a store that some have not reached": at_store("serving", "none", "none", "silent"),
    "a store that refuses some": at_store("connected", "retries", "none"),
}


@pytest.mark.golden
def test_every_sentence(golden: Callable[[str, str], None]) -> None:
    lines = [f"{name}:{look(group(name))}" for name in activity.built_in().activities]
    lines += [f"{name}:{look(one)}" for name, one in MEASURED.items()]
    alone = group("collective_wait", count=1)
    lines += [
        f"one rank that is the job:{look(alone, world_size=1)}",
        f"one rank of several:{look(alone, world_size=2)}",
        f"several nodes:{look(group('backward'), world_size=8)}",
        f"ranks between others without an answer:{look(group('backward'), group('lock', first=4), world_size=6)}",
        f"a dump that failed:{look(group('backward'), Group('f', 'unknown', (member(),), fault=Fault('0', 'X', 'x')))}",
    ]
    golden("guidance.txt", "\n".join(lines) + "\n")


def test_links_and_sequence_numbers_only_where_all_wait_for_ranks_or_gpus() -> None:
    assert LINKS in look(group("collective_wait"), group("gpu_sync", first=2))
    assert "sequence numbers" in look(group("collective_wait"))
    for name, known in ((name, activity.find_activity(name)) for name in activity.built_in().activities):
        if known.waits_for not in ("ranks", "gpu"):
            assert LINKS not in look(group("collective_wait", count=4), group(name, first=4, count=4)), name


def test_what_the_largest_groups_wait_for_is_said_first_and_once() -> None:
    many = look(*(group(name, first=2 * i) for i, name in enumerate(("storage", "checkpoint", "lock", "storage"))))
    assert many.startswith(" Check the file system: ") and "checkpoint" in many and "lock" not in many


def test_next_step_is_in_the_verdict() -> None:
    verdict = judge(Grouping(groups=(group("checkpoint", count=4),), world_size=4))
    assert not verdict.named and "Check the file system of the checkpoint" in verdict.message
