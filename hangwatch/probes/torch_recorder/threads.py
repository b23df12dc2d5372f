"""The threads that enqueued the records of a flight recorder: the main thread, one of autograd, or another.

The names of threads also show process groups: torch and NCCL name those of their communicators.

DDP and FSDP enqueue their collectives of the backward pass in threads of autograd on CUDA.
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import ProcessId
from hangwatch.model.flight_records import Library, RankRecords, ThreadKind
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.process import process_memory

MOST_THREADS = 4096
# Of `tid` in glibc's struct pthread on x86-64, nptl/descr.h; glibc 2.36 and others
TID_OFFSET = 0x2D0
# The name of torch's threads for backward passes, torch/csrc/autograd/engine.cpp
_AUTOGRAD = b"pt_autograd_"
_OF_COMMUNICATORS: dict[bytes, Library] = {b"pt_gloo_": "gloo", b"pt_nccl_": "nccl", b"NCCL ": "nccl"}
_TID = struct.Struct("<i")


def with_threads(
    recorders: Sequence[RankRecords], process: ProcessId, proc_root: Path = procfs.PROC
) -> tuple[RankRecords, ...]:
    """Return these recorders of a process with the kind of the thread of each record, "" if unknown.

    A group without records, which was used before, may be of any thread.
    """
    threads = {record.thread_id for each in recorders for record in each.records}
    kinds = _find_kinds(process, threads, proc_root)
    shown = {(each.library, record.group_id) for each in recorders for record in each.records}
    used = {(each.library, group.group_id) for each in recorders for group in each.groups if group.last_enqueued >= 0}
    if len(threads) == 1 and "other" in kinds.values() and used <= shown:
        kinds = dict.fromkeys(threads, "trainer")
    return tuple(
        replace(each, records=tuple(replace(record, thread=kinds.get(record.thread_id, "")) for record in each.records))
        for each in recorders
    )


def find_communicators(process: ProcessId, proc_root: Path = procfs.PROC) -> frozenset[Library]:
    """Return gloo, NCCL or both, if threads of the process show that it has process groups of them."""
    folder = proc_root / str(process.pid) / "task"
    names = _read_names(folder, set(map(int, procfs.list_pids(str(folder))[:MOST_THREADS])), is_inner=False)
    starts = _OF_COMMUNICATORS.items()
    return frozenset(library for name in names.values() for start, library in starts if name.startswith(start))


def _find_kinds(process: ProcessId, threads: Iterable[int], proc_root: Path) -> dict[int, ThreadKind]:
    """Return the kind of each thread by its pthread_t. Unknown threads are left out."""
    places = [(thread + TID_OFFSET, _TID.size) for thread in threads if 0 < thread < 1 << 47]
    folder = proc_root / str(process.pid)
    answer = process_memory.SHARED.read_pieces(folder / "mem", places) if places else ()
    if isinstance(answer, int) or not procfs.is_alive(process, proc_root):
        return {}
    read = zip(places, answer, strict=True)
    tids = {address - TID_OFFSET: int(_TID.unpack(raw)[0]) for (address, _), raw in read if len(raw) == _TID.size}
    main = procfs.read_inner_pid(process.pid, proc_root)
    names = _read_names(folder / "task", set(tids.values()), is_inner=main != process.pid)
    return {
        thread: "main" if tid == main else "autograd" if names[tid].startswith(_AUTOGRAD) else "other"
        for thread, tid in tids.items()
        if tid in names
    }


def _read_names(folder: Path, tids: set[int], *, is_inner: bool) -> dict[int, bytes]:
    """Return the name of each thread that exists. With `is_inner`, `tids` are those of its own PID namespace."""
    by_tid = {tid: str(tid) for tid in tids}
    if is_inner:
        outer = procfs.list_pids(str(folder))[:MOST_THREADS]
        by_tid = {procfs.read_inner_pid(int(name), folder): name for name in outer}
    raw = {tid: pseudo_files.read_start(f"{folder}/{by_tid[tid]}/comm", 64) for tid in tids if tid in by_tid}
    return {tid: name for tid, name in raw.items() if isinstance(name, bytes)}
