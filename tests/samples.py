"""Incidents for tests and screenshots of the report, as the daemon would write them.

Most are written by hand, and judged by the verdict rules.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec.structs import replace
from prometheus_client.core import Metric

from hangwatch import config, metrics
from hangwatch.model import (
    ArrivalStatus,
    Capture,
    CollectiveSeries,
    Confidence,
    Evidence,
    Fault,
    Frame,
    GpuReadings,
    Group,
    Grouping,
    Incident,
    Job,
    JobState,
    KernelFacts,
    MainThread,
    Member,
    Motion,
    PowerSeries,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    RankId,
    RankLateness,
    Stack,
    Thread,
    TimelineEntry,
    Usage,
    Verdict,
    WorkerDump,
)
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.state.board import Snapshot
from hangwatch.verdict.judge import judge

WholeT = TypeVar("WholeT", ProcessDump, RankDump, Member, Incident)
PARTS = {"main", "traffic", "waits", "gpu", "kernel", "usage", "stack", "recorder", "job", "verdict"}
OPENED = 1773458100.0  # 2026-03-14 03:15:00 UTC
NODE = "gpu-a12"
COMMAND = "python -u train.py --config configs/llama3-8b.yaml"

_LAUNCH = (Frame(function="main", file="train.py", line=214), Frame(function="<module>", file="train.py", line=231))
_STEP = (
    Frame(function="training_step", file="trainer/loop.py", line=166),
    Frame(function="fit", file="trainer/loop.py", line=98),
    *_LAUNCH,
)
ALL_REDUCE = (
    Frame(function="all_reduce", file="torch/distributed/distributed_c10d.py", line=2940),
    Frame(function="wrapper", file="torch/distributed/c10d_logger.py", line=83),
    Frame(function="_reduce_loss", file="trainer/loop.py", line=181),
    *_STEP,
)
LOADER = (
    Frame(function="poll", file="multiprocessing/popen_fork.py", line=27),
    Frame(function="wait", file="multiprocessing/connection.py", line=948),
    Frame(function="_try_get_data", file="torch/utils/data/dataloader.py", line=1131),
    Frame(function="_get_data", file="torch/utils/data/dataloader.py", line=1284),
    Frame(function="__next__", file="torch/utils/data/dataloader.py", line=701),
    Frame(function="fit", file="trainer/loop.py", line=91),
    *_LAUNCH,
)
READ_SHARD = (
    Frame(function="read", file="fsspec/implementations/local.py", line=384),
    Frame(function="read_shard", file="ourdata/shards.py", line=58),
    Frame(function="__getitem__", file="ourdata/dataset.py", line=31),
    Frame(function="fetch", file="torch/utils/data/_utils/fetch.py", line=54),
    Frame(function="_worker_loop", file="torch/utils/data/_utils/worker.py", line=349),
)
HOST = (
    ("Kernel", "5.15.0-1053-nvidia"),
    ("NVIDIA driver", "550.90.07"),
    ("GPUs", "8 x NVIDIA H100 80GB HBM3"),
    ("Uptime", "41 d 06 h"),
    ("Load", "9.1, 8.8, 8.4"),
    ("XID errors in the last hour", "none"),
)


def rank_id(rank: int, node: str = NODE, ranks_per_node: int = 8) -> RankId:
    return RankId(node=node, rank=rank, local_rank=rank % ranks_per_node, pid=41200 + rank % ranks_per_node)


def member(
    rank: int,
    node: str = NODE,
    kernel: KernelFacts = KernelFacts(state="S"),  # noqa: B008 - frozen
    usage: Usage = Usage(),  # noqa: B008
    gpu: GpuReadings = GpuReadings(),  # noqa: B008
) -> Member:
    return Member(id=rank_id(rank, node), motion=Motion.FROZEN, rounds=3, kernel=kernel, usage=usage, gpu=gpu)


def waiting(ranks: Iterable[int], node: str = NODE) -> Group:
    kernel, usage = KernelFacts(state="R"), Usage(cpu_ratio=0.99, io_bytes_per_second=0.0)
    members = (
        member(rank, node, kernel, usage, GpuReadings(power_watts=118.0 + rank % 5, utilization_ratio=1.0))
        for rank in ranks
    )
    return in_collective("a1f03c77", members, ALL_REDUCE)


def in_collective(key: str, members: Iterable[Member], frames: tuple[Frame, ...], name: str = "all_reduce") -> Group:
    return Group(
        key=key,
        activity="collective_wait",
        operation=name,
        waits_for="ranks",
        members=tuple(members),
        frames=frames,
    )


def loading(ranks: Iterable[int]) -> Group:
    kernel, usage = KernelFacts(state="S", wchan="do_sys_poll"), Usage(cpu_ratio=0.0, io_bytes_per_second=0.0)
    gpu = GpuReadings(power_watts=98.0, utilization_ratio=0.0)
    return Group(
        key="77e2b0d9",
        activity="data_loading",
        members=tuple(member(rank, NODE, kernel, usage, gpu) for rank in ranks),
        frames=LOADER,
        workers=(Stack(name="pt_data_worker", frames=READ_SHARD, activity="storage_io"),),
    )


def job(ranks: Sequence[int], world_size: int | None, job_id: str = "2180718", command: str = COMMAND) -> Job:
    return Job(
        job_id=job_id,
        job_key="6d1c0f5a9e27b384",
        owner="Slurm job 2180718",
        launcher="torchrun",
        launcher_id=ProcessId(pid=41100, start_ticks=88_123_400),
        ranks=tuple(
            Rank(
                id=ProcessId(pid=41200 + rank % 8, start_ticks=88_123_500),
                rank=rank,
                local_rank=rank % 8,
                gpu_uuids=(f"GPU-{rank % 8:08x}",),
            )
            for rank in ranks
        ),
        world_size=world_size,
        local_world_size=len(ranks),
        command=command,
        user="mira",
        job_name="llama-70b",
        program="train.py",
    )


def rank_dump(rank: int, frames: tuple[Frame, ...], workers: tuple[tuple[Frame, ...], ...] = ()) -> RankDump:
    pid = 41200 + rank % 8
    return RankDump(
        id=rank_id(rank),
        rounds=tuple(process_dump(pid, frames, number) for number in range(3)),
        workers=tuple(
            WorkerDump(
                pid=52000 + number,
                comm="pt_data_worker",
                rounds=tuple(process_dump(52000 + number, stack, at) for at in range(3)),
            )
            for number, stack in enumerate(workers)
        ),
    )


def process_dump(pid: int, frames: tuple[Frame, ...], number: int) -> ProcessDump:
    pin = Thread(
        name="Thread-1 (_pin_memory_loop)",
        thread_id=str(pid + 700),
        active=False,
        frames=(
            Frame(function="_wait", file="multiprocessing/queues.py", line=103),
            Frame(function="_pin_memory_loop", file="torch/utils/data/_utils/pin_memory.py", line=60),
            Frame(function="_bootstrap_inner", file="threading.py", line=1045),
        ),
    )
    main = Thread(name="MainThread", thread_id=str(pid), frames=frames, active=True, is_main=True)
    return ProcessDump(
        taken_monotonic_seconds=900.0 + 5 * number,
        threads=(main, pin),
        state="S",
        state_after="S",
        cpu_seconds=5210.0 + 5 * number,
        io_bytes=88_000_000,
        duration_seconds=0.021,
    )


def main_dump(frames: tuple[Frame, ...], at: float = 0.0, **fields: object) -> ProcessDump:
    """Return a dump of a process in which the main thread, its only one, has these frames."""
    main = Thread(name="MainThread", thread_id="1", frames=frames, is_main=True)
    return change_parts(ProcessDump(taken_monotonic_seconds=at, threads=(main,)), **fields)


def change_parts(whole: WholeT, **fields: object) -> WholeT:
    """Return the dump, member or incident with these fields, each in the part that has it."""
    for part in PARTS & set(whole.__struct_fields__) - fields.keys():
        value = getattr(whole, part)
        names = [name for name in value.__struct_fields__ if name in fields]
        fields[part] = replace(value, **{name: fields.pop(name) for name in names})
    return replace(whole, **fields)


def blocked_dump(rank: int) -> RankDump:
    """Return the dump of a rank in D state, of which py-spy could not read the stack."""
    found = ProcessDump(
        taken_monotonic_seconds=900.0,
        fault=D_STATE,
        state="D",
        state_after="D",
        main=MainThread(wchan="nfs_wait_bit_killable"),
        kernel_stack=(
            "nfs_wait_bit_killable+0x1e/0x90 [nfs]",
            "__wait_on_bit+0x2c/0x90",
            "nfs_file_read+0x6f/0xb0 [nfs]",
        ),
        cpu_seconds=811.2,
    )
    return RankDump(id=rank_id(rank), rounds=(found, found, found))


D_STATE = Fault(
    subject="pid 41203",
    reason="Uninterruptible",
    detail="the process is blocked in the kernel (state D, nfs_wait_bit_killable) and its memory cannot be read",
    remedy="look at the storage that it waits for: `dmesg | grep -i nfs`",
)


def power(odd_local_ranks: frozenset[int], gpus: int = 8, quiet_at: float = OPENED - 128.0) -> tuple[PowerSeries, ...]:
    """Return the power of the GPUs over 15 minutes, one sample a second. The hang begins at `quiet_at`."""
    seconds = [OPENED - 880.0 + second for second in range(900)]
    return tuple(
        PowerSeries(
            uuid=f"GPU-{index:08x}",
            index=index,
            unix_seconds=tuple(seconds),
            watts=tuple(_watts(at, index, index in odd_local_ranks, quiet_at) for at in seconds),
            limit_watts=700.0,
            busy_watts=618.0,
            low_power_threshold_watts=262.0,
            local_ranks=(index,),
        )
        for index in range(gpus)
    )


def collectives(quiet_at: float = OPENED - 128.0) -> CollectiveSeries:
    """Return the collectives of a rank over 15 minutes: 12 a second until `quiet_at`."""
    seconds = [OPENED - 880.0 + second for second in range(900)]
    totals = (4000.0 + 12.0 * min(at, quiet_at) - 12.0 * seconds[0] for at in seconds)
    return CollectiveSeries(unix_seconds=tuple(seconds), totals=tuple(totals))


def arrival() -> ArrivalStatus:
    """Return the arrival order of two ranks: rank 7 is late by 4 ms of 40 ms, rank 6 early."""
    return ArrivalStatus(
        is_named=True,
        reason="",
        message="Rank 7 (pid 41207) is late by 4 ms (10.0% of a step of 40 ms).",
        ranks=(
            RankLateness(rank=7, local_rank=7, pid=41207, lateness_seconds=0.004),
            RankLateness(rank=6, local_rank=6, pid=41206, lateness_seconds=-0.001),
        ),
        library="gloo",
        group="0",
        operation="all_reduce",
        position=0,
        records=320,
        step_seconds=0.04,
        lateness_ratio=0.1,
        standard_errors=9.0,
        last_ratio=0.98,
        ready_in_seconds=None,
    )


def _watts(at: float, index: int, odd: bool, quiet_at: float) -> float:
    ripple = 9 * math.sin(at / 3.1 + index) + 5 * math.sin(at / 17.0 + 2 * index)
    if at < quiet_at:
        step = 34 * math.sin(at / 1.9 + index / 3)
        return round(604 + 2 * index + step + ripple, 1)
    fall = max(0.0, 1 - (at - quiet_at) / 4) * 300
    return round((98 if odd else 119 + index % 5) + fall + ripple / 6, 1)


TIMELINE = (
    TimelineEntry(
        unix_seconds=OPENED - 128,
        state=JobState.QUIET,
        message="8 of 8 GPUs draw low power (104-123 W, quiet under 262 W)",
    ),
    TimelineEntry(unix_seconds=OPENED, state=JobState.SUSPECTED, message="quiet for 120 s: taking stacks of 8 ranks"),
    TimelineEntry(
        unix_seconds=OPENED + 12,
        state=JobState.HUNG,
        message="8 of 8 ranks frozen over 3 rounds 5 s apart: rank 7 differs",
    ),
)


def incident(
    *,
    groups: Sequence[Group],
    verdict: Verdict | None = None,
    dumps: Sequence[RankDump] = (),
    ranks: Sequence[int] = range(8),
    world_size: int | None = 8,
    odd_local_ranks: frozenset[int] = frozenset(),
    notes: tuple[str, ...] = (),
    timeline: tuple[TimelineEntry, ...] = TIMELINE,
) -> Incident:
    capture = Capture(
        job_id="2180718",
        job_key="6d1c0f5a9e27b384",
        node=NODE,
        started_unix_seconds=OPENED + 1.0,
        duration_seconds=10.9,
        rounds=3,
        ranks=tuple(dumps),
        world_size=world_size,
    )
    grouping = Grouping(groups=tuple(groups), world_size=world_size, notes=notes)
    return Incident(
        incident_id="20260314T031500Z-2180718-6d1c0f5a",
        node=NODE,
        job=job(ranks, world_size),
        opened_unix_seconds=OPENED,
        state=JobState.HUNG,
        verdict=verdict or judge(grouping, world_size),
        grouping=grouping,
        captures=(capture,) if dumps else (),
        power=power(odd_local_ranks),
        timeline=timeline,
        host_facts=HOST,
        hangwatch_version="0.1.0",
    )


@functools.cache
def loader_hang() -> Incident:
    """Return a hang of 8 ranks: rank 7 waits for a loader worker that is blocked in read, the others in all_reduce."""
    dumps = [rank_dump(rank, ALL_REDUCE) for rank in range(7)] + [rank_dump(7, LOADER, (LOADER[:2], READ_SHARD))]
    return incident(groups=(waiting(range(7)), loading([7])), dumps=dumps, odd_local_ranks=frozenset({7}))


@functools.cache
def blocked_in_kernel() -> Incident:
    """Return a hang in which rank 3 is in D state on NFS and py-spy cannot read it."""
    undumpable = Group(
        key="d0000000",
        activity="blocked",
        members=(
            member(
                3,
                kernel=KernelFacts(state="D", wchan="nfs_wait_bit_killable"),
                usage=Usage(cpu_ratio=0.0),
                gpu=GpuReadings(
                    power_watts=68.0,
                    utilization_ratio=0.0,
                    nvlink_bytes_per_second=0.0,
                    pcie_bytes_per_second=2.4e6,
                ),
            ),
        ),
        fault=D_STATE,
    )
    dumps = [rank_dump(rank, ALL_REDUCE) for rank in range(8) if rank != 3] + [blocked_dump(3)]
    groups = (waiting(rank for rank in range(8) if rank != 3), undumpable)
    return incident(groups=groups, dumps=dumps, odd_local_ranks=frozenset({3}))


@functools.cache
def exited() -> Incident:
    """Return a hang in which the process of rank 3 has exited and the others wait for it."""
    odd = RankId(node=NODE, rank=3, local_rank=3)
    gone = Group(key="90ne", activity="gone", members=(Member(id=odd, motion=Motion.FROZEN),), gone=True)
    left = [rank for rank in range(8) if rank != 3]
    dumps = [*(rank_dump(rank, ALL_REDUCE) for rank in left), RankDump(id=odd, gone=True)]
    found = incident(groups=(waiting(left), gone), dumps=dumps, ranks=left)
    return change_parts(found, local_world_size=8, absent_local_ranks=((3, 3),))


@functools.cache
def all_waiting() -> Incident:
    """Return a hang in which all ranks of this node wait in one collective, for a rank on another node."""
    dumps = [rank_dump(rank, ALL_REDUCE) for rank in range(8)]
    return incident(groups=(waiting(range(8)),), dumps=dumps, world_size=16)


@functools.cache
def mismatch() -> Incident:
    """Return a hang without a named rank: half of the ranks are in all_reduce and half in broadcast."""
    broadcast = (
        Frame(function="broadcast", file="torch/distributed/distributed_c10d.py", line=2781),
        Frame(function="_sync_buffers", file="trainer/loop.py", line=140),
        *_STEP,
    )
    gpu = GpuReadings(power_watts=121.0, utilization_ratio=1.0)
    members = (member(rank, kernel=KernelFacts(state="R"), usage=Usage(cpu_ratio=1.0), gpu=gpu) for rank in range(4, 8))
    other = in_collective("b4b4b4b4", members, broadcast, "broadcast")
    dumps = [rank_dump(rank, ALL_REDUCE if rank < 4 else broadcast) for rank in range(8)]
    return incident(groups=(waiting(range(4)), other), dumps=dumps)


def _judged(dumps: Sequence[RankDump]) -> Incident:
    grouping = group_ranks(dumps, activity.load(), config.Capture(), 4)
    return incident(groups=grouping.groups, dumps=dumps, world_size=4)


@functools.cache
def own_code() -> Incident:
    """Return a hang of 4 ranks: rank 2 is in a C call of the program's own code; the others are in backward."""
    backward = (
        Frame(function="_engine_run_backward", file="torch/autograd/graph.py", line=825),
        Frame(function="backward", file="torch/_tensor.py", line=581),
        Frame(function="train", file="train.py", line=44),
    )
    reserve = (
        Frame(function="reserve", file="buffers.py", line=31),
        Frame(function="train", file="train.py", line=40),
    )
    dumps = [rank_dump(rank, reserve if rank == 2 else backward) for rank in range(4)]
    return _judged(dumps)


@functools.cache
def other_line() -> Incident:
    """Return a hang of 4 ranks: rank 3 calls the same all_reduce from another line of the same function."""
    dumps = [rank_dump(rank, (*ALL_REDUCE[:2], replace(ALL_REDUCE[2], line=300 - (rank // 3)))) for rank in range(4)]
    return _judged(dumps)


@functools.cache
def parallel_groups() -> Incident:
    """Return a hang with five groups under tensor and pipeline parallelism. One rank is outside any collective."""
    calls = (
        ("all_reduce", "megatron/core/tensor_parallel/mappings.py", range(16)),
        ("recv", "megatron/core/pipeline_parallel/p2p_communication.py", range(16, 24)),
        ("send", "megatron/core/pipeline_parallel/p2p_communication.py", range(24, 28)),
        ("broadcast", "megatron/training/utils.py", range(28, 31)),
    )
    groups = tuple(
        Group(
            key=f"00000{number}aa",
            activity="point_to_point" if name in ("send", "recv") else "collective_wait",
            operation=name,
            waits_for="ranks",
            phase="evaluation" if name == "broadcast" else None,
            members=tuple(member(rank, f"gpu-a{12 + rank // 8}") for rank in ranks),
            frames=(
                Frame(function=name, file="torch/distributed/distributed_c10d.py", line=2000 + number),
                Frame(function=f"_{name}", file=file, line=90),
                Frame(function="train_step", file="megatron/training/training.py", line=613),
                Frame(function="train", file="megatron/training/training.py", line=1022),
                *_LAUNCH,
            ),
        )
        for number, (name, file, ranks) in enumerate(calls)
    )
    named = alone(loading([31]), rank_id(31, "gpu-a15"))
    return incident(groups=(*groups, named), ranks=range(24, 32), world_size=32)


def alone(group: Group, rank: RankId) -> Group:
    """Return the group with `rank` as its only member."""
    return replace(group, members=(Member(id=rank),))


@functools.cache
def fleet(nodes: int = 2048, odd_rank: int = 9731, absent_node: int | None = 77) -> Incident:
    """Return a merged incident of 2,048 nodes: one rank is outside the collective, one node did not respond."""
    absent = tuple(range(absent_node * 8, absent_node * 8 + 8)) if absent_node is not None else ()
    names = [f"gpu-{number:04d}" for number in range(nodes)]
    gone = frozenset(absent)
    ranks = [rank for rank in range(nodes * 8) if rank not in gone and rank != odd_rank]
    sizes = (0.93, 0.05, 0.02)
    callers = ("_reduce_loss", "_clip_gradients", "_sync_metrics")
    groups, start = [], 0
    for number, (share, caller) in enumerate(zip(sizes, callers, strict=True)):
        end = len(ranks) if number == len(sizes) - 1 else start + int(len(ranks) * share)
        frames = (*ALL_REDUCE[:2], Frame(function=caller, file="trainer/loop.py", line=181), *_STEP)
        members = (
            member(
                rank,
                names[rank // 8],
                kernel=KernelFacts(state="R"),
                gpu=GpuReadings(power_watts=118.0 + rank % 9),
            )
            for rank in ranks[start:end]
        )
        groups.append(in_collective(f"f00000{number:02d}", members, frames))
        start = end
    odd = rank_id(odd_rank, names[odd_rank // 8])
    groups.append(alone(loading([odd_rank]), odd))
    verdict = Verdict(
        kind="OutsideCollective",
        message=f"Rank {odd_rank} ({odd.node}) waits for its loader worker (in read_shard (ourdata/shards.py:58)). "
        f"{len(ranks):,} of the {nodes * 8 - 1:,} other ranks wait for it in all_reduce.",
        named=(odd,),
        confidence=Confidence.HIGH,
        evidence=(
            Evidence(
                "OutsideCollective", f"{len(ranks):,} of {nodes * 8:,} ranks wait in all_reduce", (odd,), supports=True
            ),
            Evidence(
                kind="NoAnswer",
                message=f"{len(absent)} ranks of {names[absent_node or 0]} did not respond; that alone names no rank",
                ranks=tuple(rank_id(rank, names[rank // 8]) for rank in absent),
            ),
        ),
    )
    return incident(groups=groups, verdict=verdict, ranks=range(8), world_size=nodes * 8)


def metric_families(snapshot: Snapshot, now: float = 0.0) -> list[Metric]:
    families = metrics.declare()
    metrics.fill(families, metrics.View(snapshot, now, config.Detector()))
    return [*families.values()]


SAMPLES = {
    "loader": loader_hang,
    "blocked": blocked_in_kernel,
    "exited": exited,
    "all-waiting": all_waiting,
    "mismatch": mismatch,
    "parallel": parallel_groups,
    "own-code": own_code,
    "other-line": other_line,
}
