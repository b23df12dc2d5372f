"""The owner of a control group, read from its path. The owner cannot forge the part of the path that is read.

Paths are matched from their root. A user may create control groups with any name below their own, but not where
slurmd or the kubelet create theirs.
"""

import re
from functools import lru_cache

_MOST_PATHS = 1024  # that are remembered; a scan reads at most 16 KiB of each
# A daemon in its own control group namespace sees other paths relative to it
_ABOVE = r"(?:/\.\.)*"

# slurm.conf's ProctrackType=proctrack/cgroup. v2: /system.slice/slurmstepd.scope/job_4711/step_0/user/task_0. If
# several slurmd run on one node, the name of the node comes first. v1: /slurm/uid_1004/job_4711/step_0/task_0. Slurm
# 26.05 writes the SLUID of the job, s00A1B2C3D4E5F, in the place of job_4711.
_SLURM = re.compile(
    rf"{_ABOVE}(?:(?:/system\.slice)?/(?:[\w.-]+_)?slurmstepd\.scope|/slurm(?:_[\w.-]+)?/uid_\d+)"
    r"/(?:job_)?(?P<name>(?<=job_)\d+|(?<!job_)s[0-9A-Z]{13})(?:/|$)"
)

# The kubelet's cgroupfs driver: /kubepods/burstable/pod<uid>/<container>. Its systemd driver:
# /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope. Both may be
# below a slice of the kubelet (--cgroup-root). If containerd has the other driver than the kubelet:
# /system.slice/containerd.service/kubepods-burstable-pod<uid>.slice:cri-containerd:<id>.
_POD = re.compile(
    rf"{_ABOVE}(?:/system\.slice/containerd\.service)?(?:/kubelet[\w.-]*|/kubepods(?:-besteffort|-burstable)?(?:\.slice)?|/besteffort|/burstable|/guaranteed"
    r"|/kubelet-kubepods(?:-besteffort|-burstable)?\.slice)*"
    r"/(?:(?:kubelet-)?kubepods(?:-besteffort|-burstable)?-)?pod(?P<name>[0-9a-f][0-9a-f_-]{7,63})(?:\.slice)?(?:[/:]|$)"
)


@lru_cache(maxsize=_MOST_PATHS)
def slurm_job(path: str) -> str | None:
    """Return the number or the SLUID of the Slurm job that owns a control group; None if no job owns it."""
    match = _SLURM.match(path)
    return match["name"] if match else None


@lru_cache(maxsize=_MOST_PATHS)
def pod(path: str) -> str | None:
    """Return the uid of the Kubernetes pod that owns a control group; None if no pod owns it."""
    match = _POD.match(path)
    return match["name"].replace("_", "-") if match else None


def describe_owner(path: str) -> str:
    """Return the owner as text: "Slurm job 4711" or "pod 6f1c..."; "" if the path names no owner."""
    if (job := slurm_job(path)) is not None:
        return f"Slurm job {job}"
    if (uid := pod(path)) is not None:
        return f"pod {uid}"
    return ""
