"""The owner of a process as the kernel reports it. A user can write an environment, but not a control group. Pure.

The owner is the Slurm job, else the Kubernetes pod; the path of the control group shows both. Without these, it is
the real user id on the host. `tables/cgroups` reads the paths.
"""

from typing import NamedTuple

from hangwatch import words
from hangwatch.model import Process
from hangwatch.tables import cgroups

_PLACE_CHARACTERS = 64


class Owner(NamedTuple):
    """The owner of a process. `name` is for people, and is the same on all nodes.

    `place` distinguishes the pods of one user, and the containers of root, in which every process has uid 0. It is
    "" if the name is enough.
    """

    name: str
    place: str = ""

    @property
    def share(self) -> str:
        """The owner as text, which is the key of the per-user limits. A long place is cut and ends in its checksum."""
        if len(self.place) <= _PLACE_CHARACTERS:
            return f"{self.name}, {self.place}" if self.place else self.name
        checksum = words.checksum(self.place.encode("utf-8", "replace"))
        return f"{self.name}, {self.place[:_PLACE_CHARACTERS]}... {checksum}"


def owner_of(process: Process) -> Owner:
    """Return the owner of a process; "an unknown user" if the kernel does not show its user id."""
    for path in process.cgroups:
        if job := cgroups.slurm_job(path):
            return Owner(f"Slurm job {job}")
    user = "an unknown user" if process.uid is None else f"uid {process.uid}"
    if pod := pod_of(process):
        return Owner(user, pod)
    return Owner(user, " ".join(process.cgroups) if process.uid == 0 else "")


def pod_of(process: Process) -> str:
    """Return the uid of the Kubernetes pod of a process, from its control group; "" outside of pods."""
    return next(filter(None, map(cgroups.pod, process.cgroups)), "")
