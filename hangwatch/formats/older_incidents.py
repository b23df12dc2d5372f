"""Converts incidents of earlier versions to the present version: where each field was before. Pure.

The content of an incident is not trusted. What has another form than expected is kept, and the decoder refuses it.
"""

from collections.abc import Mapping
from typing import Any

from hangwatch.model import spans

_MEMBER_PARTS = {
    "stack": "waited_before owns_gil user_frames task stay",
    "kernel": "state wchan receives is_held_outside silent_mount waits_for_mount kernel_call worker_call kernel_lines",
    "usage": "cpu_ratio io_bytes_per_second main_cpu_ratio switches_per_second",
    "waits": "frozen_cgroup awaited server file_lock shares_lock asks_rank stuck_on waits_in_torch store awaits_store "
    "peers enclosed_at",
    "gpu": "power_watts utilization_ratio busy_power_ratio nvlink_bytes_per_second pcie_bytes_per_second gpu_use ports",
    "recorder": "recorded recorder_faults",
}
"""The part of `Member` in which version 3 has each field of version 2."""
_RANK_PARTS = {"gpu": f"{_MEMBER_PARTS['gpu']} works_lightly"}
_DUMP_PARTS = {
    "main": "wchan call main_before main_after awaited_thread device_bytes dirty_bytes thread_in_file",
    "traffic": "socket_bytes rank_bytes object_bytes children_bytes children_cpu_seconds",
    "waits": "frozen_cgroup tracer awaited server job_server file_lock shares_lock asks_rank stuck_on waits_in_torch "
    "store awaits_store peers active_peers enclosed_at",
}
"""The parts of `RankDump` and `ProcessDump` in which version 4 has each field of version 3."""
_NEW_NAMES = {
    "main_before": "before",
    "main_after": "after",
    "kernel_call": "call",
    "kernel_lines": "lines",
    "gpu_use": "use",
    "recorded": "libraries",
    "recorder_faults": "faults",
}
"""Fields that have another name in their part."""


def upgrade(incident: dict[str, Any], version: int) -> None:
    """Convert the decoded JSON of an incident of this earlier version to the present version, in place."""
    if version < 2:
        # Change the absent local ranks of version 1, which are numbers, to ranges.
        job = incident.get("job")
        absent = job.get("absent_local_ranks") if isinstance(job, dict) else None
        if isinstance(job, dict) and isinstance(absent, list) and all(isinstance(number, int) for number in absent):
            incident["job"] = {**job, "absent_local_ranks": spans(range(number, number + 1) for number in absent)}
    for group in _objects(incident.get("grouping"), "groups"):
        for member in _objects(group, "members"):
            _set_parts(member, _MEMBER_PARTS)
            if isinstance(waits := member.get("waits"), dict):
                _rename(waits.get("awaited"), "who", "name")
                member["most_peers"] = waits.pop("most_peers", 0)
        for stack in (*_objects(group, "threads"), *_objects(group, "workers"), *_objects(group, "awaited")):
            _rename(stack, "own", "user_frame")
    for capture in _objects(incident, "captures"):
        for rank in _objects(capture, "ranks"):
            _set_parts(rank, _RANK_PARTS)
            for process in (rank, *_objects(rank, "workers")):
                for dump in _objects(process, "rounds"):
                    _rename(dump.get("awaited"), "who", "name")
                    _set_parts(dump, _DUMP_PARTS)


def _objects(parent: object, key: str) -> list[dict[str, Any]]:
    """Return the objects in the list `parent[key]`. Other values are skipped: the decoder refuses them later."""
    items = parent.get(key) if isinstance(parent, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _rename(fields: object, old: str, new: str) -> None:
    if isinstance(fields, dict) and old in fields:
        fields[new] = fields.pop(old)


def _set_parts(fields: dict[str, Any], parts: Mapping[str, str]) -> None:
    """Move the fields of a value of an earlier version into its parts."""
    for part, names in parts.items():
        if moved := {_NEW_NAMES.get(name, name): fields.pop(name) for name in names.split() if name in fields}:
            fields[part] = moved
