"""Whether the stacks of every rank could be taken, found out before they are needed.

py-spy reads the memory of a rank, which the kernel permits to the same user or with CAP_SYS_PTRACE, unless yama forbids
it or a seccomp filter stands in between. The question is asked of the kernel for each rank, without touching the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point, Value
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import dump_permissions

DUMPABLE = Metric(name="dump_permitted", help="1 if the stack of the rank may be taken", labels=contract.RANK)
OLDEST_PYSPY = (0, 4)
YAMA_FORBIDS_ALL = 3
GRANT = "run as root, or grant CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (AmbientCapabilities=; in Kubernetes, SYS_PTRACE)"


class Settings(contract.Settings, frozen=True):
    """Nothing to set."""


class RankRight(Value, frozen=True):
    """One rank: whether we may, and who it belongs to."""

    rank: contract.RankName
    pid: int
    permitted: bool
    user_id: int | None


class Sample(contract.Sample, frozen=True):
    """Our rights in general, and over each rank."""

    own: dump_permissions.Rights
    ranks: tuple[RankRight, ...] = ()


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Ask the kernel for each rank; ranks that vanish are left out."""
    own = dump_permissions.own(node.proc_root)
    if not isinstance(own, dump_permissions.Rights):
        return own
    ranks = [
        RankRight(
            rank=contract.RankName.of(job, rank),
            pid=rank.id.pid,
            permitted=permitted,
            user_id=dump_permissions.user_of(node.proc_root, rank.id.pid),
        )
        for job in node.jobs
        for rank in job.ranks
        if (permitted := dump_permissions.may_attach(node.proc_root, rank.id.pid)) is not None
    ]
    return Sample(own=own, ranks=tuple(ranks))


def points(sample: Sample) -> Iterable[Point]:
    """One number for each rank."""
    for rank in sample.ranks:
        yield DUMPABLE.point(rank.permitted, **rank.rank.labels)


def judge(window: Sequence[Sample], _: Settings) -> CheckVerdict:
    """py-spy first, then what forbids every dump, then each rank; without a job, the capabilities."""
    sample = window[-1]
    summary = f"py-spy {sample.own.pyspy_version}, {len(sample.ranks)} ranks may be dumped"
    if not sample.ranks:
        summary = f"py-spy {sample.own.pyspy_version} is there, with the right to dump any user's ranks"
    return worst([*_pyspy(sample.own), *_refused(sample), *_in_general(sample)], ok("DumpsPermitted", summary))


def _pyspy(own: dump_permissions.Rights) -> Iterator[CheckVerdict]:
    install = "pip install --upgrade 'py-spy>=0.4.1' into hangwatch's environment"
    if own.pyspy_version is None or own.pyspy_path is None:
        yield warning("PySpyMissing", "py-spy is not installed: no stack can be taken", install)
    elif _version(own.pyspy_version) < OLDEST_PYSPY:
        message = f"py-spy {own.pyspy_version} can leave a rank in uninterruptible sleep stopped for ever"
        yield warning("PySpyOld", message, install)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def _refused(sample: Sample) -> Iterator[CheckVerdict]:
    refused = [rank for rank in sample.ranks if not rank.permitted]
    if refused:
        who = ", ".join(f"{rank.rank.local_rank} of job {rank.rank.job}" for rank in refused[:4])
        more = f" and {len(refused) - 4} more" if len(refused) > 4 else ""
        why, remedy = _why(sample.own, refused[0])
        yield warning("DumpRefused", f"the stack of local rank {who}{more} may not be taken: {why}", remedy)


def _why(own: dump_permissions.Rights, rank: RankRight) -> tuple[str, str]:
    """The likeliest reason of a refusal, and what to do."""
    if own.ptrace_scope == YAMA_FORBIDS_ALL:
        return "kernel.yama.ptrace_scope is 3, which forbids it to everybody", "set it to 1 or 2, and reboot"
    if "CAP_SYS_PTRACE" not in own.capabilities:
        owner = f"it belongs to user {rank.user_id}, " if rank.user_id not in (None, own.user_id) else ""
        return f"{owner}hangwatch lacks CAP_SYS_PTRACE", GRANT
    if own.seccomp_filter:
        return "a seccomp filter forbids it", "SystemCallFilter=@system-service @debug in the unit"
    return (
        "the rank lives in a user namespace that is not ours, or a security module forbids it",
        "PrivateUsers=no in the unit; `dmesg | grep -i denied` for AppArmor and SELinux",
    )


def _in_general(sample: Sample) -> Iterator[CheckVerdict]:
    """Without a rank to ask for: what will refuse later."""
    if sample.ranks:
        return
    if sample.own.ptrace_scope == YAMA_FORBIDS_ALL:
        message = "kernel.yama.ptrace_scope is 3: no stack of any process can be taken"
        yield warning("DumpForbidden", message, "set it to 1 or 2, and reboot")
    elif "CAP_SYS_PTRACE" not in sample.own.capabilities:
        message = "hangwatch lacks CAP_SYS_PTRACE: ranks of other users cannot be dumped"
        yield warning("CapabilityMissing", message, GRANT)


def table(sample: Sample) -> contract.Rows:
    """Every rank, and our own rights."""
    own = sample.own
    scope = "none" if own.ptrace_scope is None else str(own.ptrace_scope)
    rows = [
        ("subject", "value"),
        ("capabilities", " ".join(own.capabilities) or "none of those that matter"),
        ("yama ptrace_scope", scope),
        ("seccomp filter", "yes" if own.seccomp_filter else "no"),
        ("py-spy", f"{own.pyspy_version} at {own.pyspy_path}"),
    ]
    for rank in sample.ranks:
        name = f"{rank.rank} (pid {rank.pid})"
        rows.append((name, "may be dumped" if rank.permitted else "refused"))
    return rows


CHECK = Check(
    name="dump_rights",
    every_seconds=60,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(DUMPABLE,),
    table=table,
    absent="this node shows no /proc/self/status",
)
