"""Query NCCL's RAS during a capture: the number of collectives that each rank of a job has launched."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hangwatch import config
from hangwatch.collectives import nccl_counts
from hangwatch.model import Fault, Job, NcclRas, ProcessDump, ProcessId
from hangwatch.probes.network import nccl_ras


class NcclAnswer(NamedTuple):
    """The answer of NCCL about the ranks of a job, or the fault if NCCL gave no valid answer."""

    by_process: dict[ProcessId, NcclRas]
    fault: Fault | None


def is_recorded(dumps: Iterable[ProcessDump]) -> bool:
    """True if one of these dumps contains a flight recorder of NCCL. Then NCCL need not be queried."""
    return any(recorder.library == "nccl" and recorder.records for dump in dumps for recorder in dump.recorders)


def query_nccl(job: Job, settings: config.Capture, stop: threading.Event, proc_root: Path) -> NcclAnswer:
    """Query NCCL about its collectives, until the deadline. A job without NCCL gets an empty answer without a fault."""
    ranks = [rank.id for rank in job.ranks]
    if not settings.nccl_ras:
        return NcclAnswer({}, nccl_ras.OFF if nccl_ras.has_nccl(ranks, proc_root) else None)
    statuses = nccl_ras.collect_statuses(
        ranks,
        job.share,
        wanted=settings.nccl_ras_answers,
        pause_seconds=settings.nccl_ras_pause_seconds,
        min_age_seconds=settings.nccl_ras_min_age_seconds,
        end=time.monotonic() + settings.nccl_ras_deadline_seconds,
        stop=stop,
        proc_root=proc_root,
    )
    if statuses is None or isinstance(statuses, Fault):
        return NcclAnswer({}, statuses)
    return NcclAnswer(
        nccl_counts.counts_by_rank(statuses, nccl_ras.ranks_by_nccl_name(ranks, proc_root), ranks, job.world_size), None
    )
