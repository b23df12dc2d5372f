"""PCI addresses of the GPUs, from the files of NVIDIA's driver. NVML may hang; these files do not."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from hangwatch.tables import xids

_MOST_GPUS = 64
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE)


def read_uuids(proc_root: Path) -> Mapping[str, str]:
    """Return the UUID of each GPU by its PCI address (`0000:3b:00`); empty without NVIDIA's driver.

    Source: /proc/driver/nvidia/gpus/<address>/information.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for folder in sorted((proc_root / "driver" / "nvidia" / "gpus").iterdir())[:_MOST_GPUS]:
            match = _UUID.search((folder / "information").read_text(errors="replace"))
            if match is not None:
                found[xids.shorten_address(folder.name)] = match[1]
    return found
