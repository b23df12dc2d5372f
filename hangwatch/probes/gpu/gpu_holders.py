"""Find the pods and Slurm jobs that hold the GPUs of this node.

The kubelet keeps its assignments in a JSON checkpoint file, which root can read. Ended pods may remain in it, so a pod
counts only while a process lives in its control group. (The other source, the pod-resources socket, needs gRPC.)

Slurm sets the GPUs of a job only in variables of its processes. A user can change them, but only for its own job: the
job and its user come from the kernel.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from hangwatch import words
from hangwatch.formats import decoding
from hangwatch.model import Fault, ProcessId, Value
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.process import proc_pid
from hangwatch.tables import cgroups
from hangwatch.tables.launchers import TABLE

CHECKPOINT = Path("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
CHECKPOINT_BYTES = 16 << 20
PROCESSES_ASKED = 8  # of a Slurm job, the oldest: the first process of a batch or interactive job has the variables
_RESOURCE = "nvidia.com/"
# NVIDIA's device plugin writes uuid or index (shared GPUs end in ::N); GKE's plugin writes nvidia<index>.
_DEVICE = re.compile(r"(?P<uuid>GPU-[0-9a-f-]{8,40})|(?:nvidia)?(?P<index>\d{1,3})")


class Holder(Value, frozen=True):
    """A pod or Slurm job that holds GPUs.

    `name` is "Slurm job 4711" or "pod 6f1c...". `uid` is the user of a Slurm job. `began_boot_seconds` is the start of
    the oldest living process, in seconds since boot. `container` is the container of a pod; empty for a Slurm job.
    """

    name: str
    gpu_uuids: tuple[str, ...]
    began_boot_seconds: float
    uid: int | None = None
    container: str = ""


class Holders(Value, frozen=True):
    """All holders of GPUs. `faults` are about the sources that could not be read."""

    holders: tuple[Holder, ...] = ()
    faults: tuple[Fault, ...] = ()


class _Entry(msgspec.Struct):
    pod: str = msgspec.field(name="PodUID", default="")
    container: str = msgspec.field(name="ContainerName", default="")
    resource: str = msgspec.field(name="ResourceName", default="")
    # A dictionary by NUMA node since Kubernetes 1.20.
    devices: dict[str, list[str]] | list[str] | None = msgspec.field(name="DeviceIDs", default=None)

    @property
    def ids(self) -> Iterator[str]:
        groups = self.devices.values() if isinstance(self.devices, dict) else [self.devices or []]
        return (device for group in groups for device in group)


class _Data(msgspec.Struct):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _Checkpoint(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


def read(proc_root: Path, uuids: Sequence[str]) -> Holders:
    """Return the holders of the GPUs with these uuids, which are in the order of GPU indexes."""
    members = _members_by_holder(proc_root)
    slurm = [_slurm_holder(proc_root, job, members[job], uuids) for job in members if not job.startswith("pod ")]
    pods = _pods(proc_root, members, uuids)
    if isinstance(pods, Fault):
        return Holders(holders=tuple(filter(None, slurm)), faults=(pods,))
    return Holders(holders=(*filter(None, slurm), *pods))


def _members_by_holder(proc_root: Path) -> dict[str, list[ProcessId]]:
    """Return the processes of each Slurm job and pod, the oldest first."""
    found: dict[str, list[ProcessId]] = {}
    for pid, paths in procfs.read_cgroups(proc_root):
        name = next(filter(None, map(cgroups.describe_owner, paths)), "")
        now = procfs.read_state(pid, proc_root) if name else None
        if now is not None:
            found.setdefault(name, []).append(now[0])
    return {name: sorted(found[name], key=lambda process: process.start_ticks) for name in sorted(found)}


def _slurm_holder(proc_root: Path, job: str, members: Sequence[ProcessId], uuids: Sequence[str]) -> Holder | None:
    """Return a Slurm job with the GPUs that the variables of its processes name; None if they name no GPU.

    slurmstepd runs as root, and does not have these variables.
    """
    users = {member.pid: procfs.read_user_id(member.pid, proc_root) for member in members}
    uid = next((user for user in users.values() if user), 0)
    user_pids = [member.pid for member in members if users[member.pid] == uid][:PROCESSES_ASKED]
    held_uuids = {
        uuid for pid in user_pids for uuid in _uuids_by_variables(proc_root, pid, uuids)
    }  # srun gives each step a part of the job's GPUs
    if not held_uuids:
        return None
    gpus = tuple(uuid for uuid in uuids if uuid in held_uuids)
    return Holder(name=job, gpu_uuids=gpus, began_boot_seconds=_seconds(members), uid=uid)


def _uuids_by_variables(proc_root: Path, pid: int, uuids: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that the variables of a process name. Variables of the whole job precede those of its step."""
    names = [name for scheduler in TABLE.schedulers for name in reversed(scheduler.gpus)]
    variables = proc_pid.variables(proc_root, pid, names)
    value = next(filter(None, map(variables.get, names)), "") if isinstance(variables, dict) else ""
    return tuple(uuids[index] for index in words.unfold(value) or () if index < len(uuids))


def _pods(
    proc_root: Path, members: Mapping[str, Sequence[ProcessId]], uuids: Sequence[str]
) -> tuple[Holder, ...] | Fault:
    """Return the pods in the kubelet's file, as process 1 sees the file. It is read only if this node has a pod."""
    if not any(name.startswith("pod ") for name in members):
        return ()
    raw = pseudo_files.read_bytes(proc_root / "1" / "root" / CHECKPOINT, "kubelet", CHECKPOINT_BYTES)
    if not isinstance(raw, bytes):
        return raw or ()
    try:
        entries = decoding.decode_json(raw, _Checkpoint).data.entries or []
    except (msgspec.DecodeError, RecursionError) as error:
        detail = f"/{CHECKPOINT}: {words.elided(str(error), 120)}"
        remedy = (
            "this kubelet uses an unknown format: set `enabled = false` in `[checks.gpu_allocation]`, and report it"
        )
        return Fault(subject="kubelet", reason="UnreadableCheckpoint", detail=detail, remedy=remedy)
    return tuple(_pod_holders(entries, members, uuids))


def _pod_holders(
    entries: Iterable[_Entry], members: Mapping[str, Sequence[ProcessId]], uuids: Sequence[str]
) -> Iterator[Holder]:
    for entry in entries:
        name = f"pod {entry.pod}"
        held_uuids = {uuid for device in entry.ids if (uuid := _uuid(device, uuids)) is not None}
        if entry.resource.startswith(_RESOURCE) and held_uuids and name in members:
            yield Holder(
                name=name,
                gpu_uuids=tuple(uuid for uuid in uuids if uuid in held_uuids),
                began_boot_seconds=_seconds(members[name]),
                container=words.elided(entry.container, 63),
            )


def _uuid(device: str, uuids: Sequence[str]) -> str | None:
    found = _DEVICE.fullmatch(device.partition("::")[0])
    if found is None:
        return None
    if found["uuid"]:
        return found["uuid"] if found["uuid"] in uuids else None
    return uuids[int(found["index"])] if int(found["index"]) < len(uuids) else None


def _seconds(members: Sequence[ProcessId]) -> float:
    return members[0].start_ticks / procfs.TICKS_PER_SECOND
