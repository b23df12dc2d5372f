"""Choice of the source of GPU readings for this node."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from hangwatch.probes.gpu import amd_sysfs
from hangwatch.probes.gpu.amd_sysfs import AmdSampler
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node import pci

NodeSampler: TypeAlias = NvmlSampler | AmdSampler


def make_sampler(*, sample_seconds: float, deadline_seconds: float, sys_root: Path = Path("/sys")) -> NodeSampler:
    """Return the sampler for AMD GPUs if the node has some and no NVIDIA GPU, else the one for NVIDIA GPUs."""
    if amd_sysfs.find_cards(sys_root) and not pci.nvidia_gpus(sys_root):
        return AmdSampler(sample_seconds=sample_seconds, deadline_seconds=deadline_seconds, sys_root=sys_root)
    return NvmlSampler(sample_seconds=sample_seconds, deadline_seconds=deadline_seconds)
