"""Input for checks: fixture trees of /proc and /sys, jobs in these trees, and runs of one check."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hangwatch.checks.framework import registry, runner
from hangwatch.model import CheckResult, Job, ProcessId, Rank, Worker
from hangwatch.probes.base.filesystems import FilesystemReader
from hangwatch.probes.base.pseudo_files import PAGE_BYTES
from hangwatch.probes.node.kmsg import KernelEvents, KernelLog
from hangwatch.probes.node.machine import Clock, Node
from hangwatch.probes.torch_recorder import Recorders
from tests.checks_page import list_metrics

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max file size             unlimited            unlimited            bytes
Max open files            {soft}                 {hard}               files
Max locked memory         8388608              8388608              bytes
"""
STATUS = """Name:\t{comm}
State:\t{state} (whatever)
Pid:\t{pid}
Uid:\t{uid}\t{uid}\t{uid}\t{uid}
CapEff:\t{capabilities}
Seccomp:\t{seccomp}
"""
ALL_CAPABILITIES = "000001ffffffffff"


class FakeClock:
    """A monotonic clock and a wall clock, which advance only when the test moves them."""

    def __init__(self, monotonic: float = 1000.0, unix: float = 1.7e9) -> None:
        self.now_monotonic, self.now_unix = monotonic, unix

    def pass_seconds(self, seconds: float) -> None:
        self.now_monotonic += seconds
        self.now_unix += seconds

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now_monotonic, unix=lambda: self.now_unix)


class NodeTree:
    """A node in a folder. Write files below `proc`, `sys` and `dev`, then call `node()`."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc, self.sys, self.dev = root, root / "proc", root / "sys", root / "dev"
        for folder in (self.proc, self.sys, self.dev):
            folder.mkdir(parents=True)
        self.time = FakeClock()

    def node(self, *jobs: Job, **others: Any) -> Node:
        plain = Node(
            proc_root=self.proc,
            sys_root=self.sys,
            dev_root=self.dev,
            jobs=jobs,
            clock=self.time.clock(),
            kernel_log=KernelLog(),
            filesystems=FilesystemReader(),
            recorders=Recorders(self.proc),
        )
        return replace(plain, **others)

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def make_unreadable(self, path: str) -> None:
        """Put a folder in the place of a file: reading it fails, for root, too."""
        (self.root / path).unlink(missing_ok=True)
        (self.root / path).mkdir(parents=True)

    def put_in_namespace(self, view: int | str, kind: str, inode: int) -> None:
        """Let a process be in another namespace of this kind, for example "net"."""
        link = self.proc / str(view) / "ns" / kind
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(f"{kind}:[{inode}]")

    def log(self, *lines: str, boot_seconds: float = 990.0, first: int = 1) -> None:
        """Write records in the format of /dev/kmsg. The tree's clock is at 1000 s after boot."""
        with (self.dev / "kmsg").open("a") as file:
            file.writelines(f"4,{at},{int(boot_seconds * 1e6)},-;{line}\n" for at, line in enumerate(lines, first))

    def read_log(self) -> KernelEvents:
        events = KernelLog().read(self.dev / "kmsg")
        assert isinstance(events, KernelEvents)
        return events

    def process(  # noqa: PLR0913 - a file's field each, and most tests set one
        self,
        pid: int | str,
        *,
        comm: str = "python",
        state: str = "S",
        soft: str = "1048576",
        hard: str = "1048576",
        open_files: int = 10,
        environ: dict[str, str] | None = None,
        start_ticks: int = 100,
        rss_kib: int = 1024,
        uid: int = 0,
        capabilities: str = ALL_CAPABILITIES,
        seccomp: int = 0,
    ) -> None:
        """Write the files of a process in /proc."""
        home = f"proc/{pid}"
        self.write(f"{home}/comm", comm + "\n")
        self.write(f"{home}/limits", LIMITS.format(soft=soft, hard=hard))
        self.write(
            f"{home}/status",
            STATUS.format(comm=comm, state=state, pid=pid, uid=uid, capabilities=capabilities, seccomp=seccomp),
        )
        fields = [state, "1", "1", "1", "0", "-1", "4194304", *["0"] * 12, str(start_ticks)]
        fields += ["0", str(rss_kib * 1024 // PAGE_BYTES), *["0"] * 28]
        self.write(f"{home}/stat", f"{pid} ({comm}) {' '.join(fields)}\n")
        self.write(f"{home}/environ", "\0".join(f"{name}={value}" for name, value in (environ or {}).items()) + "\0")
        self.write(f"{home}/maps", "")
        self.write(f"{home}/mem", "")
        folder = self.root / home / "fd"
        folder.mkdir(exist_ok=True)
        for number in range(open_files):
            (folder / str(number)).write_text("")


def refuse_open(patch: pytest.MonkeyPatch, name: str) -> None:
    """Refuse to open files of which the path ends with this name, as the kernel does without a capability."""

    def guarded(path: Path | str, *arguments: int, really_open: Callable[..., int] = os.open) -> int:
        if str(path).endswith(name):
            raise PermissionError(1, "Operation not permitted")
        return really_open(path, *arguments)

    patch.setattr(os, "open", guarded)


def job(*ranks: Rank, job_id: str = "77", **others: Any) -> Job:
    """Return a torchrun job with these ranks."""
    return Job(job_id=job_id, launcher="torchrun", launcher_id=None, ranks=ranks, **others)


def rank(pid: int, local_rank: int = 0, *, workers: Iterable[int] = (), start_ticks: int = 100, **others: Any) -> Rank:
    """Return a rank. `workers` are the pids of its loader workers."""
    return Rank(
        id=ProcessId(pid=pid, start_ticks=start_ticks),
        rank=local_rank,
        local_rank=local_rank,
        workers=tuple(Worker(id=ProcessId(pid=one, start_ticks=start_ticks), comm="pt_data_worker") for one in workers),
        **others,
    )


def own_start_ticks(pid: int) -> int:
    """Return the start time of the real process `pid`, in ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def real_rank(pid: int | None = None, local_rank: int = 0, **others: Any) -> Rank:
    """Return a rank that is the real process `pid`, by default this process."""
    number = pid or os.getpid()
    return rank(number, local_rank, start_ticks=own_start_ticks(number), **others)


class Checked:
    """A check that runs repeatedly and keeps its window of observations, as in the daemon."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.check = registry.checks()[name]
        self.settings = self.check.settings(**settings)
        self.window = runner.Window(self.check)

    def run(self, node: Node) -> CheckResult:
        result = runner.run(self.check, node, self.settings, self.window)
        assert result.success, f"{self.check.name} raised: see the log"
        assert result.verdict.message, "a verdict has a sentence, also when all is well"
        assert result.verdict.reason.isidentifier() and result.verdict.reason[0].isupper()
        if result.verdict.status.name != "OK":
            assert result.verdict.remedy, "a finding says what to type"
        declared = {metric.name for metric, _ in list_metrics(self.check)}
        assert {point.name for point in result.points} <= declared
        return result

    def expect(self, outcome: tuple[str, str], node: Node) -> CheckResult:
        result = self.run(node)
        assert status_and_reason(result) == outcome, result.verdict
        return result


def run(name: str, node: Node, **settings: Any) -> CheckResult:
    """Run a check once, as `hangwatch check` does."""
    return Checked(name, **settings).run(node)


def expect(outcome: tuple[str, str], name: str, node: Node, **settings: Any) -> CheckResult:
    """Run a check once. Assert its status and reason, e.g. ("WARNING", "ClockOff"), and return its result."""
    return Checked(name, **settings).expect(outcome, node)


def status_and_reason(result: CheckResult) -> tuple[str, str]:
    """Return status and reason of a result, e.g. ("WARNING", "ClockOff")."""
    return result.verdict.status.name, result.verdict.reason


def values(result: CheckResult, name: str) -> dict[tuple[str, ...], float]:
    """Return the points of metric `name` by their label values, without `job_key` and `rank`."""
    series: dict[tuple[str, ...], float] = {}
    for point in result.points:
        if point.name == name:
            labels = tuple(value for label, value in point.labels if label not in ("job_key", "rank"))
            assert labels not in series, f"{name}{labels} twice"
            series[labels] = point.value
    return series
