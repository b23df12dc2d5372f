"""Whose a control group is, by its path. Whoever works in one chooses no part of the path that is read here.

Paths are read from their root on: whoever may make control groups below his own can give them any name, but not in the
place where slurmd or the kubelet make theirs.
"""

from __future__ import annotations

import re

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


def slurm_job(path: str) -> str | None:
    """The id of the Slurm job that a control group is of, as "4711"."""
    found = _SLURM.match(path)
    return found["name"] if found else None


def pod(path: str) -> str | None:
    """The uid of the Kubernetes pod that a control group is of."""
    found = _POD.match(path)
    return found["name"].replace("_", "-") if found else None


def holder(path: str) -> str:
    """Whose it is, in words: "Slurm job 4711", "pod 6f1c..."; empty where the path does not say."""
    if (job := slurm_job(path)) is not None:
        return f"Slurm job {job}"
    if (uid := pod(path)) is not None:
        return f"pod {uid}"
    return ""
