"""Parse OOM kills in the kernel log: the killed process, and the memory limit that was hit.

See mm/oom_kill.c. The kernel first writes
`oom-kill:constraint=CONSTRAINT_MEMCG,...,oom_memcg=A,task_memcg=B,task=python,pid=1,uid=0`, at most ten times in five
seconds (dump_header). Then it writes a line for each victim: `Memory cgroup out of memory: Killed process 1 (python)
...`, or `Out of memory: ...` if no control group's limit was hit.

Owners choose the names of control groups and processes. From an ambiguous line no control group is taken.
"""

import re
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Literal, TypeAlias

from hangwatch.model import Fault, Value
from hangwatch.probes.base import pseudo_files
from hangwatch.tables import cgroups

OWNERS_KEPT = 128
# Of each owner, so that many kills of one owner do not displace those of another
KILLS_KEPT = 16
KEYS_KEPT = 512
SAME_KILL_SECONDS = 1.0  # the kernel writes the lines of one kill under one lock

Limit: TypeAlias = Literal["cgroup", "cpuset", "node"]
"""The limit that was hit: a control group's, the NUMA nodes that a process may use, or the memory of the node."""

_LIMITS: dict[str, Limit] = {
    "CONSTRAINT_MEMCG": "cgroup",
    "CONSTRAINT_CPUSET": "cpuset",
    "CONSTRAINT_MEMORY_POLICY": "cpuset",
    "CONSTRAINT_NONE": "node",
}
_SUMMARY = re.compile(
    r"oom-kill:constraint=(?P<constraint>CONSTRAINT_[A-Z_]{1,16}),.*"
    r"(?:,oom_memcg=(?P<limit_cgroup>/.*)|,global_oom),task_memcg=(?P<cgroup>/.*),task=.{1,15},pid=(?P<pid>\d{1,10}),uid=\d{1,10}"
)
_KEYS = (",mems_allowed=", ",oom_memcg=", ",global_oom", ",task_memcg=", ",task=")
_KILLED = re.compile(
    r"(?P<by_cgroup>Memory cgroup out|Out) of memory(?: \([a-z_ ]{1,40}\))?: "
    r"Kill(?:ed)? process (?P<pid>\d{1,10}) \((?P<comm>.{1,15})\)"
    r"(?: total-vm:\d+kB, anon-rss:\d+kB, file-rss:\d+kB, shmem-rss:\d+kB, UID:(?P<uid>\d{1,10}) |[ ,]|$)"
)
_GROUP = re.compile(r"Tasks in (?P<cgroup>/.*) are going to be killed due to memory\.oom\.group set")

LITERALS = ("oom-kill:", "Tasks in ", "ut of memory")
"""Every line that `OomLog` uses contains one of these."""


class OomKill(Value, frozen=True):
    """A killed process, its control group and the group that reached its limit; both are empty if unknown."""

    pid: int
    comm: str
    boot_seconds: float
    limit: Limit
    uid: int | None = None
    cgroup: str = ""
    limit_cgroup: str = ""

    @property
    def owner(self) -> str:
        """The owner of the process: "Slurm job 4711", "pod 6f1c...", or else "uid 1000"."""
        return cgroups.describe_owner(self.cgroup) or ("an unknown user" if self.uid is None else f"uid {self.uid}")


class OomKills(Value, frozen=True):
    """The newest kills of each owner, oldest first. `counts` are the totals by comm and limit."""

    kills: tuple[OomKill, ...] = ()
    counts: tuple[tuple[str, Limit, int], ...] = ()


class OomLog:
    """A reader of the lines of the log, in order. It keeps a limited number of owners, and of kills per owner."""

    def __init__(self) -> None:
        self._summary: OomKill | None = None  # by a line before the kill, which has no comm; pid 0: a whole group
        self._kept: OrderedDict[tuple[Limit, str], deque[OomKill]] = OrderedDict()
        self._counts: Counter[tuple[str, Limit]] = Counter()
        self._result: OomKills | None = None  # shared by all results until the next kill

    def read_line(self, text: str, boot_seconds: float) -> None:
        """Parse the text of a log line, and keep the kill that it reports, if any."""
        if text.startswith("oom-kill:"):
            self._summary = _parse_summary(text, boot_seconds)
        elif text.startswith("Tasks in "):
            self._read_group(text, boot_seconds)
        elif "ut of memory" in text and (found := _KILLED.match(text)):
            self._keep(self._kill(found, boot_seconds))

    def _read_group(self, text: str, boot_seconds: float) -> None:
        match, summary = _GROUP.fullmatch(text), self._summary
        if match is None:
            return
        is_same = summary is not None and boot_seconds - summary.boot_seconds < SAME_KILL_SECONDS
        limit_cgroup = summary.limit_cgroup if summary is not None and is_same else ""
        self._summary = OomKill(0, "", boot_seconds, "cgroup", cgroup=match["cgroup"], limit_cgroup=limit_cgroup)

    def _kill(self, match: re.Match[str], boot_seconds: float) -> OomKill:
        pid, uid, summary = int(match["pid"]), match["uid"], self._summary
        limit: Limit = "cgroup" if match["by_cgroup"].startswith("Memory") else "node"
        cgroup = limit_cgroup = ""
        if (
            summary is not None
            and summary.pid in (0, pid)
            and boot_seconds - summary.boot_seconds < SAME_KILL_SECONDS
            and (summary.limit == "cgroup") == (limit == "cgroup")
        ):
            limit, cgroup, limit_cgroup = summary.limit, summary.cgroup, summary.limit_cgroup
        return OomKill(
            pid=pid,
            comm=match["comm"],
            boot_seconds=boot_seconds,
            limit=limit,
            uid=None if uid is None else int(uid),
            cgroup=cgroup,
            limit_cgroup=limit_cgroup,
        )

    def _keep(self, kill: OomKill) -> None:
        self._result = None
        key = (kill.limit, kill.owner)
        self._kept.setdefault(key, deque(maxlen=KILLS_KEPT)).append(kill)
        self._kept.move_to_end(key)
        if len(self._kept) > OWNERS_KEPT:
            self._kept.popitem(last=False)
        if (kill.comm, kill.limit) in self._counts or len(self._counts) < KEYS_KEPT:
            self._counts[kill.comm, kill.limit] += 1

    def kills(self) -> OomKills:
        """Return the kept kills and the totals."""
        if self._result is None:
            kills = sorted((kill for kept in self._kept.values() for kill in kept), key=lambda kill: kill.boot_seconds)
            counts = tuple((*key, count) for key, count in sorted(self._counts.items()))
            self._result = OomKills(kills=tuple(kills), counts=counts)
        return self._result


def _parse_summary(text: str, boot_seconds: float) -> OomKill | None:
    match = None if any(text.count(key) > 1 for key in _KEYS) else _SUMMARY.fullmatch(text)
    limit = None if match is None else _LIMITS.get(match["constraint"])
    if match is None or limit is None:
        return None
    pid, cgroup, limit_cgroup = int(match["pid"]), match["cgroup"], match["limit_cgroup"] or ""
    return OomKill(pid, "", boot_seconds, limit, cgroup=cgroup, limit_cgroup=limit_cgroup)


def read_kill_count(proc_root: Path) -> int | Fault | None:
    """Return the number of OOM kills since boot, at any limit: `oom_kill` of /proc/vmstat; None before Linux 4.13."""
    text = pseudo_files.read(proc_root / "vmstat", "OOM kills")
    if not isinstance(text, str):
        return text
    rows = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return pseudo_files.number(rows.get("oom_kill"))
