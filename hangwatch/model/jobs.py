"""Processes and jobs: the values that `probes.process` and `jobs` make."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from hangwatch.model.value import Fault, Value


class ProcessId(Value, frozen=True, order=True):
    """A process: pid and start time (ticks since boot). A later process with the same pid is a different ProcessId."""

    pid: int
    start_ticks: int


class Process(Value, frozen=True):
    """One process as /proc shows it.

    `environ` holds only variables of `tables/launchers`, as the process's user wrote them. `uid` is the real user
    id in the daemon's namespace. `is_setuid`: the effective or saved user id differs from `uid`, so the process has
    more rights than that user. `is_python` is None if the executable does not show it. `is_wrapper`: it only waits for
    a child with its rank slot. `cgroups` are the different paths of /proc/PID/cgroup. `libraries` ("torch", "jax")
    are known only of processes that may set their rank after the start.
    """

    id: ProcessId
    parent_pid: int
    comm: str
    state: str
    cmdline: tuple[str, ...] = ()
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    uid: int | None = None
    is_setuid: bool = False
    cgroups: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    libraries: tuple[str, ...] = ()
    is_python: bool | None = None
    is_wrapper: bool = False


class Worker(Value, frozen=True):
    """A process that works for a rank and is not a rank itself, for example a worker of a DataLoader."""

    id: ProcessId
    comm: str
    is_python: bool = True


class Rank(Value, frozen=True):
    """One rank of a job on this node.

    `gpu_uuids` are the GPUs that it holds according to NVML, else the GPUs that its environment names. `title` is as in
    `RankId`. For an actor of Ray it lacks the method that runs at the moment. `most_peers` is the highest number of
    connections to other ranks or the store of its job that a scan has seen. `pod` is the uid of its Kubernetes pod, as
    the kernel reports it; "" outside of pods.
    """

    id: ProcessId
    rank: int | None
    local_rank: int | None
    gpu_uuids: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()
    title: str | None = None
    most_peers: int = 0
    pod: str = ""


INTERFACES_OF_ONE_NODE = frozenset({"lo", "docker0"})
"""Interfaces that reach no other node: the loopback, and docker's bridge, which has the same network on each node."""


PortUse: TypeAlias = Literal["serving", "connected", "silent", "retries", "none"]
"""The relation of a process to the port of a server, as its sockets show it.

"serving": the process is the server. "silent": its connection request got no response. "retries": it has no connection
and its main thread sleeps, as between refused attempts.
"""


class Waiting(Value, frozen=True):
    """A launcher without ranks: its settings, as its user wrote them, and the state of its sockets.

    `nodes` is the number of nodes that the launcher needs ("2", "1:4"). `endpoint` is the address at which the
    launchers of all nodes meet. Both are empty if not set. All texts are bounded and printable, and used only as words
    in messages.

    The other fields are None until they are measured. `seconds` is the age of the launcher. `socket` is its relation to
    the endpoint. `peers` are the addresses at the other ends of its connections, 8 at most.
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
        """The port of the endpoint, None if the endpoint has no valid port."""
        number = self.endpoint.rpartition(":")[2]
        is_port = number.isascii() and number.isdecimal() and len(number) < 6 and 0 < int(number) < 1 << 16
        return int(number) if is_port else None

    @property
    def needs_several_nodes(self) -> bool:
        """True if the launcher's settings ask for more than one node."""
        return self.nodes not in ("", "1", "1:1")


class JobName(Value, frozen=True):
    """Name of a job for people, and the key that distinguishes the job from every other. `str()` returns the name."""

    job_id: str
    job_key: str

    @property
    def labels(self) -> dict[str, str]:
        """Labels for every metric series about the job."""
        return {"job_id": self.job_id, "job_key": self.job_key}

    @property
    def in_log(self) -> str:
        """The name with the key: `job train (6d1c0f5a9e27b384)`. Commands accept the key, which is unique."""
        return f"job {self.job_id} ({self.job_key})"

    def __str__(self) -> str:
        return self.job_id


class Died(Value, frozen=True):
    """The end of a dead rank, from its crash artifacts. Both texts are bounded and printable.

    `text` is shown in metrics, pages and the daemon's log. For an exception it is the type and the place. `detail` is
    the owner's text, without secrets of known forms, for users who may read the incident. It is empty if `text` is
    complete.

    `of_others`: the text reports a lost or unresponsive rank, so another rank failed before this one. `is_first`: no
    rank of this node is known to have died earlier.
    """

    text: str
    unix_seconds: float
    of_others: bool = False
    is_first: bool = False
    detail: str = ""

    @property
    def full_text(self) -> str:
        """The full text, for users who may read the incident."""
        return self.detail or self.text


class EndedProcess(Value, frozen=True):
    """A rank or worker without a process: a scan that ended at `gone_unix_seconds` did not find it.

    `died` is set after `crash` has read the crash artifacts.
    """

    id: ProcessId
    rank: int | None
    local_rank: int | None
    gone_unix_seconds: float
    is_worker: bool = False
    died: Died | None = None
    gpu_uuids: tuple[str, ...] = ()


class Job(Value, frozen=True):
    """All ranks of one job on this node. A job without ranks has only its launcher (`launcher_id`, `waiting`).

    Identity: `job_id` is a name for people, which the job's user chose. `job_key` is equal on all nodes of the job, and
    no other user can make an equal key. It is a checksum of that name, the owner, the address at which the ranks meet,
    and, for a job on one node only, the node. `job_name` is the user's name for the job, from a scheduler or an
    operator (Slurm's job name, the PyTorchJob). `program` is the script that its ranks run. Both are bounded, of plain
    characters, and used only as words in messages.

    Owner: the kernel reports `owner`. `user` is the name of the user id by the host's name service, `uid N` until that
    answers, None in a pod. `uid` is the user id of all ranks on this node. It is None if they differ, if a rank is a
    setuid program, or in a pod, where user ids are not those of the node. `share` is the key of the per-user limits:
    the owner, and the pod or container if the owner alone is too coarse.

    Ranks: `more_launcher_ids` are the launchers of its other pods or containers on this node. `holds_gpu`: the driver
    lists one of its ranks. `absent_local_ranks` should be on this node and have no process: [first, last] of each
    range, because the expected number comes from an environment and may be huge. `ended` are ranks and workers that no
    longer have a process, limited in number. `notes` are sentences about the scan. `libraries` are "torch" and "jax",
    those that its ranks map; None while unknown.
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
    libraries: tuple[str, ...] | None = None

    @property
    def is_engine(self) -> bool:
        """True for an inference engine: its workers are listed and dumped like ranks, but not monitored."""
        return self.launcher == "engine"

    @property
    def launcher_ids(self) -> tuple[ProcessId, ...]:
        """The launchers of the job's ranks on this node: one, none, or one in each of its pods or containers."""
        return (() if self.launcher_id is None else (self.launcher_id,)) + self.more_launcher_ids

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The processes of the job's ranks, or of its launchers while it has no ranks."""
        return tuple(rank.id for rank in self.ranks) or (self.launcher_ids if self.waiting else ())

    @property
    def key(self) -> str:
        """The key that distinguishes this job from every other. Incidents older than keys have the job id instead."""
        return self.job_key or self.job_id

    def is_called(self, wanted: str) -> bool:
        """True if `wanted` is the job's key, its id, or the name that its user gave it."""
        return bool(wanted) and wanted in (self.key, self.job_id, self.job_name)

    @property
    def name(self) -> JobName:
        """Name and key of the job."""
        return JobName(job_id=self.job_id, job_key=self.key)

    @property
    def absent(self) -> tuple[range, ...]:
        """The local ranks that should be on this node and have no process, in rising order."""
        return tuple(range(first, last + 1) for first, last in self.absent_local_ranks)

    @property
    def pids(self) -> frozenset[int]:
        """The pids of the job's ranks and of their workers."""
        ids = [process for rank in self.ranks for process in (rank.id, *(worker.id for worker in rank.workers))]
        return frozenset(process.pid for process in ids)

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs that the ranks hold, each once, in the order of ranks."""
        return tuple(dict.fromkeys(uuid for rank in self.ranks for uuid in rank.gpu_uuids))

    @property
    def ranks_here(self) -> int:
        """Number of ranks that the job should have on this node, including those without a process."""
        return len(self.ranks) + sum(last + 1 - first for first, last in self.absent_local_ranks)

    @property
    def has_ranks_on_other_nodes(self) -> bool:
        """True if the job has ranks on other nodes. False if its world size is not known."""
        return (self.world_size or 0) > max(len(self.ranks), self.local_world_size or 0)


def find_jobs(wanted: str, jobs: Iterable[Job]) -> list[Job]:
    """Return the job with the key `wanted`, else the jobs with this id, else those with this user-given name.

    There are several jobs if users chose the same name.
    """
    known = [job for job in jobs if job.is_called(wanted)]
    by_key = [job for job in known if job.key == wanted]
    return by_key or [job for job in known if job.job_id == wanted] or known


class NotMonitored(Value, frozen=True):
    """Number of jobs, ranks and processes (not read at all) of one owner that are not monitored on this node."""

    owner: str
    jobs: int = 0
    ranks: int = 0
    processes: int = 0

    def __str__(self) -> str:
        return f"of {self.owner}: {self.jobs:,} jobs with {self.ranks:,} ranks, {self.processes:,} processes not read"


class FoundJobs(Value, frozen=True):
    """Result of a scan: the jobs to monitor, inference engines, and the numbers of jobs that are not monitored."""

    jobs: tuple[Job, ...] = ()
    engines: tuple[Job, ...] = ()
    left_out: tuple[NotMonitored, ...] = ()


LONGEST_SILENCE_SECONDS = 7 * 86400.0
SHORTEST_SILENCE_SECONDS = 60.0
LONGEST_REASON = 160  # characters; the reason is a label of a metric


class PageSilence(JobName, frozen=True):
    """A job that does not page until `until_unix_seconds`. User `uid` asked for it. `reason` may be empty."""

    until_unix_seconds: float
    uid: int
    reason: str = ""


class SilenceAnswer(Value, frozen=True):
    """The daemon's answer about a silence. `problem` is the reason why a restart of the daemon ends the silence."""

    silence: PageSilence
    problem: str | None = None
