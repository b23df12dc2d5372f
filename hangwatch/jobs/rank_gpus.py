"""Pure: which GPUs a rank holds, by the driver's list of processes, else by what its environment allows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hangwatch.model import GpuSample
from hangwatch.tables.launchers import TABLE


def gpus_of(
    pids: Collection[int], environ: Mapping[str, str], local_rank: int | None, gpus: Sequence[GpuSample]
) -> tuple[str, ...]:
    """The uuids of the GPUs that hold any of `pids` (a rank and its children), in the order of their index.

    A rank that has not touched its GPU yet is in no list of the driver's: then its environment tells, by the custom
    that local rank N takes the Nth GPU it can see. What others hold by the driver's word, no environment gives away.
    """
    held = tuple(gpu.uuid for gpu in gpus if not set(pids).isdisjoint(gpu.pids))
    if held:
        return held
    taken = {gpu.uuid for gpu in gpus if gpu.pids}
    return tuple(uuid for uuid in _claimed(environ, local_rank, gpus) if uuid not in taken)


def _claimed(environ: Mapping[str, str], local_rank: int | None, gpus: Sequence[GpuSample]) -> tuple[str, ...]:
    """The GPU that the environment gives a rank; the only one where there is no choice."""
    visible = _visible(environ, [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.index)])
    if len(visible) == 1:
        return tuple(visible)
    if local_rank is None or local_rank >= len(visible):
        return ()
    return (visible[local_rank],)


def _visible(environ: Mapping[str, str], uuids: list[str]) -> list[str]:
    """The GPUs that CUDA shows this process, first its number 0; see CUDA_VISIBLE_DEVICES in NVIDIA's guide."""
    granted = _granted(environ, uuids)
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return granted
    names = [name.strip() for name in value.split(",")]
    if all(name.isdecimal() for name in names):
        granted = _renumbered(environ, names, granted)
    found: list[str] = []
    for name in names:
        uuid = _one(name, granted)
        if uuid is None:  # CUDA stops at the first one it does not know
            break
        found.append(uuid)
    return found


def _granted(environ: Mapping[str, str], uuids: list[str]) -> list[str]:
    """The GPUs of a container that was given some of them by uuid; else all of the node."""
    names = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    inside = [uuid for uuid in uuids if uuid in names]
    return inside or uuids


def _renumbered(environ: Mapping[str, str], names: list[str], uuids: list[str]) -> list[str]:
    """With Slurm's device cgroups a step counts its GPUs from 0; a variable of its own has the node's numbers."""
    values = (environ.get(name) for scheduler in TABLE.schedulers for name in scheduler.gpus)
    given = next(filter(None, values), "").split(",")
    if not all(name.isdecimal() for name in given) or set(names) <= set(given):
        return uuids
    return [uuids[int(name)] for name in given if int(name) < len(uuids)]


def _one(name: str, uuids: list[str]) -> str | None:
    if name.isdecimal():
        return uuids[int(name)] if int(name) < len(uuids) else None
    matches = [uuid for uuid in uuids if name and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None
