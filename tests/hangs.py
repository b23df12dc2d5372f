"""The known hangs and healthy look-alikes of tests/data/hangs.toml, as dumps for the verdict rules."""

from typing import Any, Literal

from hangwatch import config
from hangwatch.model import (
    Awaited,
    Died,
    Fault,
    FileLock,
    Frame,
    Grouping,
    KernelLine,
    ProcessDump,
    RankDump,
    RankId,
    Thread,
    Verdict,
    WorkerDump,
)
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tables import kernel_lines
from hangwatch.verdict import judge
from tests.conftest import load_table
from tests.samples import change_parts

CASES = load_table("hangs.toml")["case"]
TABLE = activity.load()
SETTINGS = config.Capture()


def numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def frames(lines: list[str], shift: int = 0) -> tuple[Frame, ...]:
    found = []
    for line in lines:
        function, _, rest = line.rstrip(")").rpartition(" (")
        file, colon, number = rest.rpartition(":")
        found.append(
            Frame(function=function, file=file if colon else rest, line=int(number) + shift if colon else None)
        )
    return tuple(found)


def dump(stand: dict[str, Any], number: int, pid: int) -> ProcessDump:
    shift = number if stand.get("moving") else 0
    threads = []
    if "frames" in stand:
        threads.append(
            Thread(
                name="MainThread",
                thread_id=str(pid),
                frames=frames(stand["frames"], shift),
                owns_gil=stand.get("gil", False),
                is_main=True,
                installed_frames=stand.get("installed"),
            )
        )
    for place, extra in enumerate(stand.get("threads", ())):
        threads.append(
            Thread(name=extra["name"] or None, thread_id=str(pid + 100 + place), frames=frames(extra["frames"]))
        )
    states = stand.get("states")
    return change_parts(
        ProcessDump(taken_monotonic_seconds=5.0 * number, threads=tuple(threads)),
        fault=fault(pid, *stand["fault"]) if "fault" in stand else None,
        state=states[number] if states else stand.get("state"),
        wchan=stand.get("wchan"),
        cpu_seconds=5.0 * number * stand.get("cpu", 0.0),
        io_bytes=int(5.0 * number * stand.get("io", 0.0)),
        file_lock=FileLock(path="/data/the.lock", holder_pid=1000 + stand["lock_of"]) if "lock_of" in stand else None,
        shares_lock=stand.get("shares_lock", False),
        stuck_on=stand.get("stuck_on"),
        awaited=Awaited(name=stand["awaited"]) if "awaited" in stand else None,
        waits_in_torch=stand.get("in_torch", False),
    )


def kernel_line(text: str) -> KernelLine:
    said = kernel_lines.find(text)
    assert said is not None, f"no row of kernel_lines.toml is of this line: {text}"
    return KernelLine(name=said.name, text=text, unix_seconds=0.0, subject=said.subject, where=said.where)


def fault(pid: int, reason: str, detail: str, about: Literal["target", "tool"] = "tool") -> Fault:
    return Fault(subject=f"pid {pid}", reason=reason, detail=detail, about=about)


def rank_dumps(case: dict[str, Any]) -> list[RankDump]:
    found = []
    size, rounds = case.get("node_size", 8), range(case.get("rounds", 1))
    for stand in case["stands"]:
        for rank in numbers(stand["ranks"]):
            pid = 1000 + rank
            workers = ()
            if "workers" in stand:
                thread = Thread(name="MainThread", thread_id="1", frames=frames(stand["workers"]), is_main=True)
                loader = tuple(ProcessDump(taken_monotonic_seconds=5.0 * n, threads=(thread,)) for n in rounds)
                workers = tuple(WorkerDump(pid=9000 + n, comm="pt_data_worker", rounds=loader) for n in range(4))
            found.append(
                change_parts(
                    RankDump(id=RankId(node=f"node{rank // size}", rank=rank, local_rank=rank % size, pid=pid)),
                    rounds=() if stand.get("gone") else tuple(dump(stand, n, pid) for n in rounds),
                    workers=workers,
                    gone=stand.get("gone", False),
                    power_watts=stand.get("power"),
                    utilization_ratio=stand.get("utilization"),
                    kernel_lines=tuple(map(kernel_line, stand.get("kernel", ()))),
                    died=Died(**stand["died"]) if "died" in stand else None,
                )
            )
    return found


def judged(case: dict[str, Any]) -> tuple[Grouping, Verdict]:
    grouping = group_ranks(rank_dumps(case), TABLE, SETTINGS, case.get("world_size"))
    on_one_node = case.get("seen_by") == "its node"
    return grouping, judge.judge(grouping, len(grouping.members) if on_one_node else None)
