"""The GPUs of a rank: by the driver's list of processes, else by the rank's environment. Pure."""

from collections.abc import Collection, Mapping, Sequence

from hangwatch.model import GpuSample
from hangwatch.tables.launchers import TABLE


def find_gpus(
    pids: Collection[int], environ: Mapping[str, str], local_rank: int | None, gpus: Sequence[GpuSample]
) -> tuple[str, ...]:
    """Return the uuids of the GPUs that a rank or its children hold, ordered by index. `pids` are their pids.

    A rank that has not used its GPU yet is not in the driver's list. Then its environment decides, by the
    convention that local rank N takes the Nth visible GPU. A GPU on which the driver lists other processes is left
    out. Exception: a MIG instance, because a GPU has several.
    """
    held = tuple(gpu.uuid for gpu in gpus if not set(pids).isdisjoint(gpu.pids))
    if held:
        return held
    taken = {gpu.uuid for gpu in gpus if gpu.pids and not gpu.mig_uuids}
    return tuple(uuid for uuid in _claimed(environ, local_rank, gpus) if uuid not in taken)


def _claimed(environ: Mapping[str, str], local_rank: int | None, gpus: Sequence[GpuSample]) -> list[str]:
    """Return the GPU that the environment gives a rank: the only visible one, else the one with its local rank."""
    instances = {instance: gpu.uuid for gpu in gpus for instance in gpu.mig_uuids}
    visible = _visible(environ, [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.index)], instances)
    if len(visible) == 1:
        return visible
    return [] if local_rank is None else visible[local_rank : local_rank + 1]


def _visible(environ: Mapping[str, str], uuids: list[str], instances: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA shows to this process, in CUDA's order; see CUDA_VISIBLE_DEVICES in NVIDIA's guide.

    `instances` are the GPUs of the MIG instances. CUDA shows one instance to a process, by its uuid.
    """
    granted = _granted(environ, uuids, instances)
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return granted
    names = [name.strip() for name in value.split(",")]
    if all(name.isdecimal() for name in names):
        granted = _renumbered(environ, names, granted)
    visible: list[str] = []
    for name in names:
        uuid = instances.get(name) or _resolve_name(name.removeprefix("MIG-").partition("/")[0], granted)
        if uuid is None:  # CUDA stops at the first unknown name
            break
        visible.append(uuid)
    return visible


def _granted(environ: Mapping[str, str], uuids: list[str], instances: Mapping[str, str]) -> list[str]:
    """Return the GPUs in NVIDIA_VISIBLE_DEVICES, which a container gets by uuid; without any, all GPUs of the node."""
    names = [instances.get(name, name) for name in environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")]
    return [uuid for uuid in uuids if uuid in names] or uuids


def _renumbered(environ: Mapping[str, str], names: list[str], uuids: list[str]) -> list[str]:
    """Return the GPUs that Slurm gave a step, if the step counts its GPUs from 0; else all of `uuids`.

    With Slurm's device cgroups, a step counts its GPUs from 0, and Slurm's own variable has the node's numbers.
    """
    values = (environ.get(name) for scheduler in TABLE.schedulers for name in scheduler.gpus)
    given = next(filter(None, values), "").split(",")
    if not all(name.isdecimal() for name in given) or set(names) <= set(given):
        return uuids
    return [uuids[int(name)] for name in given if int(name) < len(uuids)]


def _resolve_name(name: str, uuids: list[str]) -> str | None:
    if name.isdecimal():
        return uuids[int(name)] if int(name) < len(uuids) else None
    matches = [uuid for uuid in uuids if name and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None
