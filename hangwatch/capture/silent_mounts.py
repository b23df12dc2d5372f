"""Find file systems that do not respond and therefore block py-spy."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import BLOCKED_STATES, FUSE_WAITS, Fault, ProcessDump, ProcessId
from hangwatch.probes.node import filesystems
from hangwatch.probes.process import pyspy

_MOUNT_DEADLINE_SECONDS = 3.0


def find_mounts(
    targets: Sequence[ProcessId], taken: Sequence[dict[ProcessId, ProcessDump]], proc_root: Path
) -> dict[int, filesystems.Mount]:
    """Return the file systems that did not respond to a test, by pid of the process on which py-spy hung."""
    stuck = [target.pid for target in targets if any(_hung(one[target].fault) for one in taken)]
    return filesystems.SHARED.find_silent_mounts(proc_root, stuck, _MOUNT_DEADLINE_SECONDS) if stuck else {}


def _hung(fault: Fault | None) -> bool:
    return fault is not None and fault.reason in pyspy.STUCK_REASONS


def add_to_fault(dump: ProcessDump, mount: filesystems.Mount | None) -> ProcessDump:
    """Return the dump with the file system `mount` added to its fault, if py-spy hung; any other dump unchanged."""
    if mount is None or dump.fault is None or not _hung(dump.fault):
        return dump
    detail = f"{dump.fault.detail}; its program or a library is on {mount}, which does not respond"
    return replace(dump, fault=replace(dump.fault, detail=detail))


def is_waiting_for(rounds: Sequence[ProcessDump], mount: filesystems.Mount | None) -> bool:
    """True if the kernel shows the process in a call on this file system in every round."""
    if mount is None:
        return False
    places = FUSE_WAITS if mount.type.startswith("fuse") else frozenset[str]()
    return all(
        dump.state in BLOCKED_STATES or dump.called == mount.device or dump.main.wchan in places for dump in rounds
    )
