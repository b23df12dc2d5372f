"""Pure: whose process is it, as the kernel says? An environment is written by its user, a control group is not.

The owner of a process is its Slurm job, else its Kubernetes pod, each by the path of its control group, else the real
user id as the host sees it. How paths are read: `tables/cgroups`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from hangwatch.model import Process
from hangwatch.tables import cgroups

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
        if job := cgroups.slurm_job(path):
            return Owner(f"Slurm job {job}")
    user = "an unknown user" if process.uid is None else f"uid {process.uid}"
    for path in process.cgroups:
        if pod := cgroups.pod(path):
            return Owner(user, pod)
    return Owner(user, " ".join(process.cgroups) if process.uid == 0 else "")


def is_in_pod(process: Process) -> bool:
    """Whether the kernel says that it runs in a pod of Kubernetes."""
    return any(cgroups.pod(path) is not None for path in process.cgroups)
