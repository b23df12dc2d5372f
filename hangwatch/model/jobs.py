"""Processes and jobs: probes.procs -> hang.jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from hangwatch.model.value import Fault, Value


class ProcessId(Value, frozen=True, order=True):
    """A process that cannot be confused with a later one of the same pid: pid and start time (ticks since boot)."""

    pid: int
    start_ticks: int


class Process(Value, frozen=True):
    """One process as /proc shows it. `environ` holds only variables of `tables/launchers`, as its user wrote them.

    `uid` is the real user id in the namespace of the daemon, `cgroups` are the different paths of /proc/PID/cgroup.
    `is_setuid` where its effective or saved user id is another: then it is more than a process of that user.
    """

    id: ProcessId
    parent_pid: int
    comm: str
    state: str
    cmdline: tuple[str, ...] = ()
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    uid: int | None = None
    is_setuid: bool = False
    user: str | None = None
    cgroups: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


class Worker(Value, frozen=True):
    """A process that works for a rank and is no rank itself: a DataLoader worker, a map worker."""

    id: ProcessId
    comm: str


class Rank(Value, frozen=True):
    """One rank of a job on this node. `gpu_uuids` are those it holds by NVML, else those its environment gives it."""

    id: ProcessId
    rank: int | None
    local_rank: int | None
    gpu_uuids: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()


INTERFACES_OF_ONE_NODE = frozenset({"lo", "docker0"})
"""Over which no other node is reached: the loopback, and docker's bridge with the same network on each."""


PortUse: TypeAlias = Literal["serving", "connected", "silent", "retries", "none"]
"""What a process has to do with a port that somebody serves; "silent": its request to connect has no answer.

"retries": it has no connection and its main thread sleeps, as one does between attempts that are refused.
"""


class Waiting(Value, frozen=True):
    """A launcher that has no rank: what it was told, as its user wrote it, and what its own sockets show.

    `nodes` is how many it wants ("2", "1:4"), `endpoint` where the launchers of all nodes meet; empty where it was not
    told. All are bounded, printable and believed for words only. What follows is None until it is measured: `seconds`
    since it began; `socket`: it is "serving" the endpoint itself, "connected" to it, its request to connect is "silent"
    (without an answer), or it has "none" there. `peers` are the addresses at the other end, 8 at most.
    """

    launcher: str
    run_id: str = ""
    nodes: str = ""
    endpoint: str = ""
    seconds: float | None = None
    socket: PortUse | None = None
    peers: tuple[str, ...] = ()

    @property
    def port(self) -> int | None:
        """The port of the endpoint, None where it was told none that can be one."""
        number = self.endpoint.rpartition(":")[2]
        is_port = number.isascii() and number.isdecimal() and len(number) < 6 and 0 < int(number) < 1 << 16
        return int(number) if is_port else None

    @property
    def is_for_nodes(self) -> bool:
        """Whether it was told of more than one node."""
        return self.nodes not in ("", "1", "1:1")


class JobName(Value, frozen=True):
    """Which job is meant: its name for people, and the key that tells it from every other. It reads as the name."""

    job_id: str
    job_key: str

    @property
    def labels(self) -> dict[str, str]:
        """What every series about it is labelled with."""
        return {"job_id": self.job_id, "job_key": self.job_key}

    @property
    def in_log(self) -> str:
        """`job train (6d1c0f5a9e27b384)`: two jobs of one name look alike without the key, which commands take, too."""
        return f"job {self.job_id} ({self.job_key})"

    def __str__(self) -> str:
        return self.job_id


class Died(Value, frozen=True):
    """What the files that a dead rank left say of its end, bounded and printable.

    `text` stands in metrics, pages and the daemon's log: of an exception its type and place. `detail` is the owner's
    word, without secrets of known forms, for who may read the incident; empty where `text` says all.

    `of_others`: it complains of a lost or silent rank, so it followed somebody. `is_first`: of all that died on its
    node none has died before it, as far as something tells.
    """

    text: str
    unix_seconds: float
    of_others: bool = False
    is_first: bool = False
    detail: str = ""

    @property
    def told(self) -> str:
        """All that is known, for who may read the incident."""
        return self.detail or self.text


class EndedProcess(Value, frozen=True):
    """A rank of a job, or a worker of it, whose process is gone: a scan that ended at `gone_unix_seconds` missed it.

    `died` is known once what it left has been read, see `crash`.
    """

    id: ProcessId
    rank: int | None
    local_rank: int | None
    gone_unix_seconds: float
    is_worker: bool = False
    died: Died | None = None


class Job(Value, frozen=True):
    """All ranks of one job on this node; or its launcher, `launcher_id`, while it has none (`waiting`).

    `job_id` is a name for people, which the job's user chose; `job_key` is a checksum of that, of the owner that the
    kernel names, of the address at which the ranks meet, and of the node where the job is on one node only: what is
    equal on all nodes of a job, and cannot be made equal by somebody else. `owner` and `user` are that owner and the
    name that the environment gives; `uid` is the user id that all ranks have on this node, None where they differ or a
    rank is a setuid program, and in a pod, whose users are not those of the node. `more_launcher_ids` are the launchers
    of its other pods or containers on this node. `share` says who is given a share of
    what one node bears: the owner, and the pod or container where the owner alone tells too little. `holds_gpu`: the
    driver lists one of its ranks. `absent_local_ranks` are those that should be on this node and have no process:
    [first, last] of each range, since an environment says how many there should be. `ended` are processes of it that
    were seen and are gone, so many at most. `notes` are sentences about what was found.

    `job_name` is what the user calls it where a scheduler or an operator tells (Slurm's job name, the PyTorchJob),
    `program` the script that its ranks run: both bounded, of plain characters, and believed for words only.
    """

    job_id: str
    launcher: str
    launcher_id: ProcessId | None
    ranks: tuple[Rank, ...]
    world_size: int | None = None
    local_world_size: int | None = None
    absent_local_ranks: tuple[tuple[int, int], ...] = ()
    command: str = ""
    user: str | None = None
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    job_key: str = ""
    owner: str = ""
    uid: int | None = None
    share: str = ""
    holds_gpu: bool = False
    notes: tuple[str, ...] = ()
    waiting: Waiting | None = None
    more_launcher_ids: tuple[ProcessId, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    job_name: str = ""
    program: str = ""

    @property
    def launcher_ids(self) -> tuple[ProcessId, ...]:
        """The launchers of its ranks on this node: one, none, or one in each of its pods or containers."""
        return (() if self.launcher_id is None else (self.launcher_id,)) + self.more_launcher_ids

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The processes that are the job: its ranks, or its launcher while it has none."""
        return tuple(rank.id for rank in self.ranks) or (self.launcher_ids if self.waiting else ())

    @property
    def key(self) -> str:
        """What tells this job from every other; the name in an incident of before there were keys."""
        return self.job_key or self.job_id

    def is_called(self, wanted: str) -> bool:
        """Whether it goes by this: its key, its id, or the name that its user gave it."""
        return bool(wanted) and wanted in (self.key, self.job_id, self.job_name)

    @property
    def name(self) -> JobName:
        """Its name and its key."""
        return JobName(job_id=self.job_id, job_key=self.key)

    @property
    def absent(self) -> tuple[range, ...]:
        """The local ranks that should be on this node and have no process, in rising order."""
        return tuple(range(first, last + 1) for first, last in self.absent_local_ranks)

    @property
    def pids(self) -> frozenset[int]:
        """The processes of its ranks and of their workers."""
        ids = [process for rank in self.ranks for process in (rank.id, *(worker.id for worker in rank.workers))]
        return frozenset(process.pid for process in ids)

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs that the ranks hold, each once, in the order of ranks."""
        return tuple(dict.fromkeys(uuid for rank in self.ranks for uuid in rank.gpu_uuids))

    @property
    def ranks_here(self) -> int:
        """How many ranks it should have on this node, those without a process included."""
        return len(self.ranks) + sum(last + 1 - first for first, last in self.absent_local_ranks)

    @property
    def is_elsewhere_too(self) -> bool:
        """Whether it has ranks that are not of this node, as far as anything says how many there are."""
        return (self.world_size or 0) > max(len(self.ranks), self.local_world_size or 0)


def called(wanted: str, jobs: Iterable[Job]) -> list[Job]:
    """The jobs that are meant by this: the one of this key, else those of this id, else those whose user calls them so.

    Several where users chose one name.
    """
    known = [job for job in jobs if job.is_called(wanted)]
    by_key = [job for job in known if job.key == wanted]
    return by_key or [job for job in known if job.job_id == wanted] or known


class LeftOut(Value, frozen=True):
    """What an owner has on this node beyond what is watched of him: whole jobs, ranks, and processes not even read."""

    owner: str
    jobs: int = 0
    ranks: int = 0
    processes: int = 0

    def __str__(self) -> str:
        return f"of {self.owner}: {self.jobs:,} jobs with {self.ranks:,} ranks, {self.processes:,} processes not read"


class FoundJobs(Value, frozen=True):
    """What a scan found: the jobs to watch, and what was left out."""

    jobs: tuple[Job, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
