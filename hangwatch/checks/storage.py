"""Response of every mounted network file system, free space for incidents, and presence of the NVMe disks.

A rank that reads a shard from a dead mount stays in an uninterruptible sleep, and all other ranks wait for it in a
collective. The check covers the mounts of this node and those in the mount namespaces of the ranks. A child process
reads them, so a dead mount cannot block hangwatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok, unknown, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckStatus, CheckVerdict, Fault, Value
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.base.filesystems import NOT_STARTED
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

INCIDENTS = "incidents"
MOUNTS_LIMIT = 64
MINIMUM_INCIDENT_BYTES = 64 << 20
MINIMUM_AVAILABLE_RATIO = 0.01  # on a network file system
REMEDY_HUNG = (
    "`dmesg | tail`; check the server and the network to it; `umount -f -l` makes blocked calls fail, which ends the "
    "jobs that use it"
)
MOST_LINKS = 8
REMEDY_MISSING = "a rank in another mount namespace sees other files: give the path as /proc/PID/root/FILE"
REMEDY_SLOW = "check the load of the server and the network to it: `nfsstat -rc`, /proc/self/mountstats"


class Settings(contract.Settings, frozen=True):
    """Limits on response time and free space."""

    deadline_seconds: Annotated[
        float, describe("a file system that does not respond within this time is hung", 0.1, 3.5)
    ] = 3.0
    slow_seconds: Annotated[float, describe("warning if a response takes longer than this", 0.0, 7.0)] = 1.0
    also_types: Annotated[tuple[str, ...], describe("more file system types to check")] = ()
    ignored_mounts: Annotated[tuple[str, ...], describe("mount points that are not checked")] = ()


class Answer(Value, frozen=True):
    """The response of one file system. Either `space` or `fault` is set.

    It is mounted in the mount namespace of pid `seen_by`; None: of the node.
    """

    mount: str
    type: str
    seen_by: int | None = None
    space: filesystems.Space | None = None
    fault: Fault | None = None


class Sample(contract.Sample, frozen=True):
    """The response of every file system that was checked, and the NVMe disks of this node by PCI address."""

    answers: tuple[Answer, ...] = ()
    disks: Mapping[str, str] = msgspec.field(default_factory=dict)
    stuck_children: int = 0


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Measure the network mounts of this node and of the ranks, and the directory of incidents, all in parallel."""
    mounts = _paths(node, settings)
    directory = node.state_directory
    # The daemon creates its directory when it starts. Until then, the space of the parent directory counts.
    directories = [str(path) for path in (directory, *directory.parents)] if directory else []
    spaces = node.filesystems.read_space([*mounts, *directories], settings.deadline_seconds)
    faults = {path: space for path, space in spaces.items() if isinstance(space, Fault)}
    reasons = {path: fault.reason for path, fault in faults.items()}
    if NOT_STARTED in reasons.values():
        return next(fault for fault in faults.values() if fault.reason == NOT_STARTED)
    # A mount that was unmounted during the measurement fails, but is not broken: ignore it.
    still_mounted = _paths(node, settings) if not faults.keys().isdisjoint(mounts) else mounts
    answers = [
        _answer(mount, spaces[path], seen_by)
        for path, (mount, seen_by) in mounts.items()
        # Not broken: a FUSE mount that only another user may read, not even root; and a mount that is missing in the
        # namespace of a rank: it disappeared with the rank, or with the process that mounted it.
        if reasons.get(path) not in ("PermissionDenied", "" if seen_by is None else "Missing")
        if path not in faults or still_mounted.get(path) == (mount, seen_by)
    ]
    if directories:
        present = (spaces[path] for path in directories if reasons.get(path) != "Missing")
        space = next(present, spaces[directories[0]])
        answers.append(_answer(filesystems.Mount(path=directories[0], type=INCIDENTS, source="", device=""), space))
    disks = pci.nvme_disks(node.sys_root)
    if not answers and not disks:
        return None
    return Sample(answers=tuple(answers), disks=disks, stuck_children=node.filesystems.abandoned.count())


def _answer(mount: filesystems.Mount, space: filesystems.Space | Fault, seen_by: int | None = None) -> Answer:
    if isinstance(space, Fault):
        return Answer(mount=mount.path, type=mount.type, seen_by=seen_by, fault=space)
    return Answer(mount=mount.path, type=mount.type, seen_by=seen_by, space=space)


def _paths(node: Node, settings: Settings) -> dict[str, tuple[filesystems.Mount, int | None]]:
    """Return path -> (network mount, pid of a rank that has this mount). Each file system is listed once.

    The pid is None for a mount of the node itself.
    """
    views = [None, *(job.ranks[0].id.pid for job in node.jobs if job.ranks)]
    namespaces: set[str | None] = set()
    devices: set[str] = set()
    mounts: dict[str, tuple[filesystems.Mount, int | None]] = {}
    for seen_by in views:
        view = "self" if seen_by is None else str(seen_by)
        namespace = procfs.namespace(node.proc_root, view, "mnt")
        if namespace is not None and namespace in namespaces:
            continue
        namespaces.add(namespace)
        seen = filesystems.mounts(node.proc_root, view)
        for mount in seen if isinstance(seen, tuple) else ():
            if mount.device in devices or mount.path in settings.ignored_mounts or len(mounts) >= MOUNTS_LIMIT:
                continue
            if filesystems.is_network(mount, settings.also_types):
                devices.add(mount.device)
                path = mount.path if seen_by is None else f"{node.proc_root}/{view}/root{mount.path}"
                mounts[path] = mount, seen_by
    return mounts


METRICS = (
    Metrics[Sample, Sample](
        Metric(
            "storage_stuck_children",
            "children of hangwatch that hang in a dead mount",
            lambda sample: sample.stuck_children,
        ),
    ),
    Metrics[Sample, Answer](
        Metric("storage_answers", "1 while the file system responds in time", lambda answer: answer.space is not None),
        Metric(
            "storage_answer_seconds",
            "duration of the last statvfs call",
            lambda answer: None if answer.space is None else answer.space.seconds,
        ),
        Metric(
            "storage_available_bytes",
            "bytes left for ordinary users",
            lambda answer: None if answer.space is None else answer.space.available_bytes,
        ),
        Metric(
            "storage_size_bytes",
            "size of the file system",
            lambda answer: None if answer.space is None else answer.space.size_bytes,
        ),
        subjects=lambda sample: sample.answers,
        labels={"mount": lambda answer: answer.mount, "type": lambda answer: answer.type},
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the response, response time and free space of each file system."""
    sample = window[-1]
    findings = [finding for answer in sample.answers for finding in _judge_one(answer, settings)]
    network = [answer for answer in sample.answers if answer.type != INCIDENTS]
    slowest = max((answer.space.seconds for answer in network if answer.space), default=0.0)
    mounted = (
        f"{words.count(len(network), 'network file system')} mounted; slowest response {slowest * 1000:.1f} ms"
        if network
        else "no network file system is mounted"
    )
    disks = f"; {words.count(len(sample.disks), 'NVMe disk')} present" if sample.disks else ""
    return worst(findings, ok("StorageAnswers", mounted + disks))


def _judge_one(answer: Answer, settings: Settings) -> Iterator[CheckVerdict]:
    name = "the directory of incidents" if answer.type == INCIDENTS else f"{answer.mount} ({answer.type})"
    if answer.seen_by is not None:
        name += f" in the mount namespace of pid {answer.seen_by}"
    if answer.fault is not None:
        yield _judge_fault(name, answer, answer.fault, settings)
        return
    assert answer.space is not None
    free, size = answer.space.available_bytes, answer.space.size_bytes
    if answer.space.seconds > settings.slow_seconds:
        message = f"{name} took {answer.space.seconds:.1f} s to respond (limit {settings.slow_seconds:g} s)"
        yield warning("StorageSlow", message, REMEDY_SLOW)
    if answer.type == INCIDENTS and free < MINIMUM_INCIDENT_BYTES:
        limit = f"limit {MINIMUM_INCIDENT_BYTES / (1 << 20):.0f} MiB"
        message = f"{name} {answer.mount} has {free / (1 << 20):.0f} MiB left ({limit})"
        yield warning("IncidentSpaceLow", message, "free space, or set [store] directory to another file system")
    elif size and free < size * MINIMUM_AVAILABLE_RATIO and not answer.space.read_only:
        message = f"{name} has {free / size:.1%} left (limit {MINIMUM_AVAILABLE_RATIO:.1%})"
        yield warning("StorageFull", message, "free space: checkpoints will fail")


def _judge_fault(name: str, answer: Answer, fault: Fault, settings: Settings) -> CheckVerdict:
    if fault.reason == "NoAnswer":
        message = f"{name} did not respond within {settings.deadline_seconds:g} s"
        return critical("StorageHung", message, REMEDY_HUNG)
    if answer.type == INCIDENTS:
        return warning("IncidentsBlocked", f"{name}: {fault.detail}", "check [store] directory")
    remedy = f"umount -l {answer.mount} and mount it again"
    if answer.seen_by is not None:
        remedy = f"check the server; the container of pid {answer.seen_by}, and so its job, must be restarted"
    return critical("StorageBroken", f"{name}: {fault.detail}", remedy)


def judge_file(path: str, node: Node, settings: Settings, links_left: int = MOST_LINKS) -> CheckVerdict:
    """Judge one file by request: its mount, then its kind. The file is not touched if its mount does not respond.

    A symbolic link is followed in the mount namespace of the path.
    """
    mount, root = filesystems.find_mount(path, node.proc_root)
    if mount is None:
        return unknown(
            "MountsUnread",
            f"{words.printable(path)}: no mount of this process, if its mounts can be read, holds it",
            "try sudo; in a chroot, run it outside",
        )
    space = node.filesystems.read_space([root + mount.path], settings.deadline_seconds)[root + mount.path]
    if isinstance(space, Fault) and space.reason == "NoAnswer":
        return _judge_fault(str(mount), _answer(mount, space), space, settings)
    kind = node.filesystems.read_kind(path, root, settings.deadline_seconds)
    shown = words.printable(path)
    if isinstance(kind, Fault):
        text = f"{shown}: {kind.detail.removeprefix(f'{path}: ')}; it is on {_describe_mount(mount, settings)}"
        if kind.reason == "PermissionDenied":
            return unknown(kind.reason, text, "try sudo")
        remedy = REMEDY_MISSING if kind.reason == "Missing" else REMEDY_HUNG
        return critical("FileHung" if kind.reason == "NoAnswer" else kind.reason, text, remedy)
    if kind.target and links_left:
        judged = judge_file(kind.target, node, settings, links_left - 1)
        return replace(judged, message=f"{shown} is a link: {judged.message}")
    seen = filesystems.mounts(node.proc_root, Path(root).parent.name or "self")
    mounted = [each for each in seen if each.device == kind.device] if isinstance(seen, tuple) else []
    text = (
        f"{shown} is a {kind.words} on {_describe_mount(mount if mount in mounted else (*mounted, mount)[0], settings)}"
    )
    if kind.words == "FIFO":
        return warning("FileIsFifo", text, "start what opens its other end; a new file at its path ends no wait")
    return ok("FileAnswers", text)


def _describe_mount(mount: filesystems.Mount, settings: Settings) -> str:
    is_network = filesystems.is_network(mount, settings.also_types)
    source = words.printable(mount.source)
    where = f"{mount.type} of {source}" if is_network else f"{source}, {mount.type}, local"
    return f"{where}, mounted at {words.printable(mount.path)}"


def table(sample: Sample) -> contract.Rows:
    """Return one row per file system."""
    yield "mount", "type", "response time (s)", "available (GiB)", "size (GiB)"
    for answer in sample.answers:
        if answer.space is None:
            yield answer.mount, answer.type, answer.fault.reason if answer.fault else "", "", ""
            continue
        free, size = (f"{number / (1 << 30):.1f}" for number in (answer.space.available_bytes, answer.space.size_bytes))
        yield answer.mount, answer.type, f"{answer.space.seconds:.4f}", free, size


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    parts=lambda sample: {address: f"NVMe disk {name} at {address}" for address, name in sample.disks.items()},
    vanished=CheckStatus.CRITICAL,
    absent="this node has no NVMe disk and no network file system mounted, and stores no incidents",
)
