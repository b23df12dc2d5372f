"""What /proc/cpuinfo says of the processor: who made it, and what it is able to do."""

from __future__ import annotations

from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes import pseudo_files


class Cpu(Value, frozen=True):
    """Vendor ("AuthenticAMD", "GenuineIntel") and flags of a processor; empty where it does not tell them."""

    vendor: str = ""
    flags: frozenset[str] = frozenset()


def read(proc_root: Path) -> Cpu | Fault | None:
    """The first processor of /proc/cpuinfo; None where there is no such file."""
    text = pseudo_files.read(proc_root / "cpuinfo", "cpuinfo")
    if not isinstance(text, str):
        return text
    rows = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in rows.items()}
    return Cpu(vendor=values.get("vendor_id", ""), flags=frozenset(values.get("flags", "").split()))
