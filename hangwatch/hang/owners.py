"""Pure: whose process is it, as the kernel says? An environment is written by its user, a control group is not.

The owner of a process is its Slurm job, else its Kubernetes pod, each by the path of its control group, else the real
user id as the host sees it. Paths are read from their root on: whoever may make control groups below his own can give
them any name, but not in the place where slurmd or the kubelet make theirs.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple

from hangwatch.model import Process

_ABOVE = r"(?:/\.\.)*"  # a daemon in a control group namespace of its own sees the others' paths from there

# slurm.conf's ProctrackType=proctrack/cgroup. v2: /system.slice/slurmstepd.scope/job_4711/step_0/user/task_0, with the
# name of the node in front where several slurmd run on one; v1: /slurm/uid_1004/job_4711/step_0/task_0.
_SLURM = re.compile(
    rf"{_ABOVE}(?:(?:/system\.slice)?/(?:[\w.-]+_)?slurmstepd\.scope|/slurm(?:_[\w.-]+)?/uid_\d+)/job_(?P<name>\d+)(?:/|$)"
)

# The kubelet's cgroupfs driver: /kubepods/burstable/pod<uid>/<container>; its systemd driver:
# /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope. Each may lie
# below a slice of the kubelet's own (--cgroup-root).
_POD = re.compile(
    rf"{_ABOVE}(?:/kubelet[\w.-]*|/kubepods(?:-besteffort|-burstable)?(?:\.slice)?|/besteffort|/burstable|/guaranteed"
    r"|/kubelet-kubepods(?:-besteffort|-burstable)?\.slice)*"
    r"/(?:(?:kubelet-)?kubepods(?:-besteffort|-burstable)?-)?pod(?P<name>[0-9a-f][0-9a-f_-]{7,63})(?:\.slice)?(?:/|$)"
)


_PLACE_CHARACTERS = 64


class Owner(NamedTuple):
    """Whose a process is. `name` says it to people and is the same on all nodes.

    `place` tells apart the pods of one user, and the containers of root, in which everybody is uid 0; it is empty where
    the name alone tells enough.
    """

    name: str
    place: str = ""

    @property
    def share(self) -> str:
        """Who is given a share of what one node watches, in words; a long place is cut, and ends in its checksum."""
        if len(self.place) <= _PLACE_CHARACTERS:
            return f"{self.name}, {self.place}" if self.place else self.name
        checksum = blake2b(self.place.encode("utf-8", "replace"), digest_size=8).hexdigest()
        return f"{self.name}, {self.place[:_PLACE_CHARACTERS]}... {checksum}"


def owner_of(process: Process) -> Owner:
    """The owner of a process; "an unknown user" where the kernel did not say."""
    for path in process.cgroups:
        if found := _SLURM.match(path):
            return Owner(f"Slurm job {found['name']}")
    user = "an unknown user" if process.uid is None else f"uid {process.uid}"
    for path in process.cgroups:
        if found := _POD.match(path):
            return Owner(user, found["name"].replace("_", "-"))
    return Owner(user, " ".join(process.cgroups) if process.uid == 0 else "")


def is_in_pod(process: Process) -> bool:
    """Whether the kernel says that it runs in a pod of Kubernetes."""
    return any(_POD.match(path) for path in process.cgroups)
