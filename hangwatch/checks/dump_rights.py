"""Permission to take the stacks of every rank, tested before the stacks are needed.

py-spy reads the memory of a rank. The kernel permits that to the same user or with CAP_SYS_PTRACE, unless yama or a
seccomp filter forbids it. The check tests this permission for each rank. The rank is not stopped.
"""

from collections.abc import Iterator, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Value, list_by_key
from hangwatch.probes.base import procfs
from hangwatch.probes.base.interpreter import pip_install
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import dump_obstacles, dump_permissions, pyspy, pystack

MOST_JOBS = 4  # in one message
YAMA_FORBIDS_ALL = 3
ALLOW_PTRACE = "set kernel.yama.ptrace_scope = 1 in /etc/sysctl.d, then reboot"
GRANT = (
    "run hangwatch as root, or grant it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH "
    "(AmbientCapabilities=; in Kubernetes, SYS_PTRACE)"
)


class RankRight(Value, frozen=True):
    """The permission to dump one rank, and the user of the rank. `user_id` is None if it is not known.

    `obstacle` is the known reason why the dumpers cannot read the rank.
    """

    rank: contract.RankName
    pid: int
    permitted: bool
    user_id: int | None
    obstacle: Fault | None = None


class Sample(contract.Sample, frozen=True):
    """The rights of the hangwatch process, and its permission to dump each rank."""

    rights: dump_permissions.Rights
    ranks: tuple[RankRight, ...] = ()


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Test the permission to dump each rank. Ranks that end meanwhile are skipped."""
    rights = dump_permissions.read_rights(node.proc_root)
    if not isinstance(rights, dump_permissions.Rights):
        return rights
    ranks = [
        RankRight(
            rank=contract.RankName.of_rank(job, rank),
            pid=rank.id.pid,
            permitted=permitted,
            user_id=procfs.read_user_id(rank.id.pid, node.proc_root),
            obstacle=dump_obstacles.find_obstacle(rank.id.pid, node.proc_root, has_pystack=pystack.is_installed()),
        )
        for job in node.jobs
        for rank in job.ranks
        if (permitted := dump_permissions.may_attach(node.proc_root, rank.id.pid)) is not None
    ]
    return Sample(rights=rights, ranks=tuple(ranks))


METRICS = (
    Metrics[Sample, RankRight](
        Metric("dump_permitted", "1 if hangwatch may take the stack of the rank", lambda rank: rank.permitted),
        subjects=lambda sample: sample.ranks,
        labels=contract.RANK,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Judge py-spy, then the permission for each rank. If no rank runs, judge the rights of hangwatch."""
    sample = window[-1]
    ranks = words.count(len(sample.ranks), "rank")
    permitted = f"permitted for {ranks}" if sample.ranks else "permitted for ranks of every user"
    summary = f"stack dumps {permitted}; py-spy {_show_version(sample.rights)}"
    problems = [*_pyspy(sample.rights), *_refused(sample), *_unreadable(sample), *_in_general(sample)]
    return worst(problems, ok("DumpsPermitted", summary))


def _pyspy(rights: dump_permissions.Rights) -> Iterator[CheckVerdict]:
    install = pip_install("py-spy>=0.4.1")
    if rights.pyspy_version is None or rights.pyspy_path is None:
        yield warning("PySpyMissing", "py-spy is not installed: no stack can be taken", install)
    elif rights.pyspy_version and rights.pyspy_version < pyspy.OLDEST_VERSION:
        version = _show_version(rights)
        message = f"py-spy {version} is too old (minimum 0.4): a rank in D state may stay stopped after a dump"
        yield warning("PySpyOld", message, install)


def _show_version(rights: dump_permissions.Rights) -> str:
    return ".".join(map(str, rights.pyspy_version or ())) or "of unknown version"


def _refused(sample: Sample) -> Iterator[CheckVerdict]:
    refused = [rank for rank in sample.ranks if not rank.permitted]
    if refused:
        cause, remedy = _likely_cause(sample.rights, refused[0])
        yield warning("DumpRefused", f"no permission to take the stack of {_names(refused)}: {cause}", remedy)


def _unreadable(sample: Sample) -> Iterator[CheckVerdict]:
    unreadable = [(rank, rank.obstacle) for rank in sample.ranks if rank.obstacle is not None]
    for reason, alike in list_by_key((obstacle.reason, (rank, obstacle)) for rank, obstacle in unreadable).items():
        obstacle = alike[0][1]
        message = f"the stack of {_names([rank for rank, _ in alike])} cannot be read: {obstacle.detail}"
        yield warning(reason, message, obstacle.remedy)


def _names(ranks: Sequence[RankRight]) -> str:
    jobs = list_by_key((each.rank.job, each.rank.local_rank) for each in ranks)
    names = [f"local rank {_fold(local_ranks)} of job {job}" for job, local_ranks in list(jobs.items())[:MOST_JOBS]]
    more = f" and of {words.count(len(jobs) - MOST_JOBS, 'other job')}" if len(jobs) > MOST_JOBS else ""
    return ", ".join(names) + more


def _fold(local_ranks: list[str]) -> str:
    numbers = words.fold(int(rank) for rank in local_ranks if rank.isdecimal())
    return ", ".join(filter(None, (numbers, *sorted({rank for rank in local_ranks if not rank.isdecimal()}))))


def _likely_cause(rights: dump_permissions.Rights, rank: RankRight) -> tuple[str, str]:
    """Return the most likely cause of a refused dump, and the remedy."""
    if rights.ptrace_scope == YAMA_FORBIDS_ALL:
        return "kernel.yama.ptrace_scope is 3, which forbids it for all users", ALLOW_PTRACE
    if "CAP_SYS_PTRACE" not in rights.capabilities:
        owner = f"it belongs to user {rank.user_id} and " if rank.user_id not in (None, rights.user_id) else ""
        return f"{owner}hangwatch lacks CAP_SYS_PTRACE", GRANT
    if rights.seccomp_filter:
        return "a seccomp filter forbids it", "set SystemCallFilter=@system-service @debug in the unit"
    return (
        "the rank is in another user namespace, or a security module forbids it",
        "set PrivateUsers=no in the unit; `dmesg | grep -i denied` shows denials of AppArmor and SELinux",
    )


def _in_general(sample: Sample) -> Iterator[CheckVerdict]:
    """Find settings that will refuse later dumps. Yield nothing if a rank runs, because each rank is then tested."""
    if sample.ranks:
        return
    if sample.rights.ptrace_scope == YAMA_FORBIDS_ALL:
        message = "kernel.yama.ptrace_scope is 3: no stack of any process can be taken"
        yield warning("DumpForbidden", message, ALLOW_PTRACE)
    elif "CAP_SYS_PTRACE" not in sample.rights.capabilities:
        message = "hangwatch lacks CAP_SYS_PTRACE: ranks of other users cannot be dumped"
        yield warning("CapabilityMissing", message, GRANT)


def table(sample: Sample) -> contract.Rows:
    """Return the rights of the hangwatch process, then one row per rank."""
    rights = sample.rights
    scope = "none" if rights.ptrace_scope is None else str(rights.ptrace_scope)
    yield "subject", "value"
    yield "capabilities", " ".join(rights.capabilities) or "none of the required ones"
    yield "yama ptrace_scope", scope
    yield "seccomp filter", rights.seccomp_filter
    yield "py-spy", f"{_show_version(rights)} at {rights.pyspy_path}"
    for rank in sample.ranks:
        name = f"{rank.rank} (pid {rank.pid})"
        permitted = rank.obstacle.reason if rank.obstacle else "may be dumped"
        yield name, permitted if rank.permitted else "refused"


CHECK = Check(observe, METRICS, judge, table, absent="this node has no /proc/self/status")
