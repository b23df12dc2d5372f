"""Whether every mounted network file system answers, and whether incidents can be stored.

A rank that reads a shard from a dead mount sits in an uninterruptible sleep for ever, and all others wait for it in a
collective. Asked are the mounts of this node and those that the ranks see in their own mount namespace. A child
process asks, so that a dead mount can hang neither this check nor hangwatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, critical, ok, warning, worst
from hangwatch.config import Ratio
from hangwatch.model import CheckVerdict, Fault, Point, Value
from hangwatch.probes.node import filesystems
from hangwatch.probes.node.filesystems import NOT_STARTED
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

MOUNT_LABELS = ("mount", "type")
ANSWERS = Metric(name="storage_answers", help="1 while the file system answers in time", labels=MOUNT_LABELS)
SECONDS = Metric(name="storage_answer_seconds", help="time of the last answer to statvfs", labels=MOUNT_LABELS)
AVAILABLE = Metric(name="storage_available_bytes", help="bytes left for ordinary users", labels=MOUNT_LABELS)
SIZE = Metric(name="storage_size_bytes", help="size of the file system", labels=MOUNT_LABELS)
LEFT_BEHIND = Metric(name="storage_stuck_children", help="children of hangwatch that hang in a dead mount")

INCIDENTS = "incidents"
MOUNTS_LIMIT = 64
REMEDY_HUNG = (
    "`dmesg | tail`, the server's health, the network to it; once the jobs on it are given up, `umount -f -l` lets "
    "what waits there fail"
)
REMEDY_SLOW = "the server's load, the network to it: `nfsstat -rc`, /proc/self/mountstats, the server's own statistics"


class Settings(contract.Settings, frozen=True):
    """How quickly file systems must answer, and how much must be left."""

    deadline_seconds: Annotated[
        float, Meta(ge=0.1, le=3.5, description="a file system that has not answered by then is hung")
    ] = 3.0
    slow_seconds: Annotated[float, Meta(ge=0.0, le=7.0, description="an answer later than this is a warning")] = 1.0
    minimum_available_ratio: Annotated[
        Ratio, Meta(description="less space left on a network file system than this is a warning")
    ] = 0.01
    minimum_incident_bytes: Annotated[
        int, Meta(ge=0, description="less space left for incidents than this is a warning")
    ] = 64 << 20
    also_types: Annotated[tuple[str, ...], Meta(description="more file system types to ask")] = ()
    ignored_mounts: Annotated[tuple[str, ...], Meta(description="mount points that are not asked")] = ()


class Answer(Value, frozen=True):
    """One file system, of this node or as the rank `seen_by` sees it. `space` is None where `fault` says why."""

    mount: str
    type: str
    seen_by: int | None = None
    space: filesystems.Space | None = None
    fault: Fault | None = None


class Sample(contract.Sample, frozen=True):
    """Every file system that was asked; those beyond the limit are counted."""

    answers: tuple[Answer, ...]
    left_out: int = 0
    stuck_children: int = 0


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """List the network mounts of this node and of the ranks, and ask them all at once, and the folder of incidents."""
    wanted = _paths(node, settings)
    folder = node.state_directory
    # The daemon makes its folder when it starts: until then, what counts is the space of the folder above.
    homes = [str(place) for place in (folder, *folder.parents)] if folder else []
    spaces = node.filesystems.space([*wanted, *homes], settings.deadline_seconds)
    faults = (space for space in spaces.values() if isinstance(space, Fault))
    not_asked = next((fault for fault in faults if fault.reason == NOT_STARTED), None)
    if not_asked is not None:
        return not_asked
    # A mount that was taken away while it was asked fails, and is not broken.
    mounted = _paths(node, settings) if any(isinstance(spaces[path], Fault) for path in wanted) else wanted
    answers = [
        _answer(mount, spaces[path], seen_by)
        for path, (mount, seen_by) in wanted.items()
        # What is missing from a rank's view has gone with the rank, or with what mounted it there.
        if not _is_private(spaces[path]) and not (seen_by is not None and _is_missing(spaces[path]))
        if isinstance(spaces[path], filesystems.Space) or mounted.get(path) == (mount, seen_by)
    ]
    if homes:
        home = next((spaces[place] for place in homes if not _is_missing(spaces[place])), spaces[homes[0]])
        answers.append(_answer(filesystems.Mount(path=homes[0], type=INCIDENTS, source="", device=""), home))
    if not answers:
        return None
    return Sample(answers=tuple(answers), stuck_children=node.filesystems.left_behind())


def _answer(mount: filesystems.Mount, space: filesystems.Space | Fault, seen_by: int | None = None) -> Answer:
    if isinstance(space, Fault):
        return Answer(mount=mount.path, type=mount.type, seen_by=seen_by, fault=space)
    return Answer(mount=mount.path, type=mount.type, seen_by=seen_by, space=space)


def _is_private(space: filesystems.Space | Fault) -> bool:
    """A FUSE mount refuses everybody but its owner, root too: it is private, not broken."""
    return isinstance(space, Fault) and space.reason == "PermissionDenied"


def _is_missing(space: filesystems.Space | Fault) -> bool:
    return isinstance(space, Fault) and space.reason == "Missing"


def _paths(node: Node, settings: Settings) -> dict[str, tuple[filesystems.Mount, int | None]]:
    """What to ask, by path, and the rank that sees it there: each file system once, however often it is mounted."""
    views = [None, *(job.ranks[0].id.pid for job in node.jobs if job.ranks)]
    namespaces: set[str | None] = set()
    devices: set[str] = set()
    found: dict[str, tuple[filesystems.Mount, int | None]] = {}
    for seen_by in views:
        view = "self" if seen_by is None else str(seen_by)
        namespace = proc_pid.namespace(node.proc_root, view, "mnt")
        if namespace is not None and namespace in namespaces:
            continue
        namespaces.add(namespace)
        seen = filesystems.mounts(node.proc_root, view)
        for mount in seen if isinstance(seen, tuple) else ():
            if mount.device in devices or mount.path in settings.ignored_mounts or len(found) >= MOUNTS_LIMIT:
                continue
            if filesystems.is_network(mount, settings.also_types):
                devices.add(mount.device)
                path = mount.path if seen_by is None else f"{node.proc_root}/{view}/root{mount.path}"
                found[path] = mount, seen_by
    return found


def points(sample: Sample) -> Iterable[Point]:
    """Whether and how fast each one answered, and its space."""
    yield LEFT_BEHIND.point(sample.stuck_children)
    for answer in sample.answers:
        labels = {"mount": answer.mount, "type": answer.type}
        yield ANSWERS.point(answer.space is not None, **labels)
        if answer.space is not None:
            yield SECONDS.point(answer.space.seconds, **labels)
            yield AVAILABLE.point(answer.space.available_bytes, **labels)
            yield SIZE.point(answer.space.size_bytes, **labels)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Those that do not answer, then slow and full ones."""
    sample = window[-1]
    findings = [finding for answer in sample.answers for finding in _judge_one(answer, settings)]
    network = [answer for answer in sample.answers if answer.type != INCIDENTS]
    slowest = max((answer.space.seconds for answer in network if answer.space), default=0.0)
    summary = f"{len(network)} network file systems answer, the slowest in {slowest * 1000:.1f} ms"
    return worst(findings, ok("StorageAnswers", summary if network else "no network file system is mounted"))


def _judge_one(answer: Answer, settings: Settings) -> Iterator[CheckVerdict]:
    name = "the folder of incidents" if answer.type == INCIDENTS else f"{answer.mount} ({answer.type})"
    if answer.seen_by is not None:
        name += f" in the mount namespace of pid {answer.seen_by}"
    if answer.fault is not None:
        yield _judge_fault(name, answer, answer.fault, settings)
        return
    assert answer.space is not None
    left, size = answer.space.available_bytes, answer.space.size_bytes
    if answer.space.seconds > settings.slow_seconds:
        yield warning("StorageSlow", f"{name} took {answer.space.seconds:.1f} s to answer", REMEDY_SLOW)
    if answer.type == INCIDENTS and left < settings.minimum_incident_bytes:
        message = f"{name} {answer.mount} has {left / (1 << 20):.0f} MiB left"
        yield warning("IncidentSpaceLow", message, "free space, or set [store] directory elsewhere")
    elif size and left < size * settings.minimum_available_ratio and not answer.space.read_only:
        yield warning("StorageFull", f"{name} has {left / size:.1%} left", "free space: checkpoints will fail")


def _judge_fault(name: str, answer: Answer, fault: Fault, settings: Settings) -> CheckVerdict:
    if fault.reason == "NoAnswer":
        message = f"{name} gives no answer within {settings.deadline_seconds:g} s"
        return critical("StorageHung", message, REMEDY_HUNG)
    if answer.type == INCIDENTS:
        return warning("IncidentsBlocked", f"{name}: {fault.detail}", "check [store] directory")
    remedy = f"umount -l {answer.mount} and mount it again"
    if answer.seen_by is not None:
        remedy = f"the server's health; the container of pid {answer.seen_by} must be started anew, and its job with it"
    return critical("StorageBroken", f"{name}: {fault.detail}", remedy)


def table(sample: Sample) -> contract.Rows:
    """Every file system with its answer."""
    rows = [("mount", "type", "answered in (s)", "available (GiB)", "size (GiB)")]
    for answer in sample.answers:
        if answer.space is None:
            rows.append((answer.mount, answer.type, answer.fault.reason if answer.fault else "", "", ""))
            continue
        left, size = (f"{number / (1 << 30):.1f}" for number in (answer.space.available_bytes, answer.space.size_bytes))
        rows.append((answer.mount, answer.type, f"{answer.space.seconds:.4f}", left, size))
    return rows


CHECK = Check(
    name="storage",
    every_seconds=60,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(ANSWERS, SECONDS, AVAILABLE, SIZE, LEFT_BEHIND),
    table=table,
    absent="this node has no network file system mounted, and keeps no incidents",
)
