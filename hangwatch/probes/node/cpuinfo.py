"""Read the vendor and features of the processor from /proc/cpuinfo."""

from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes import pseudo_files


class Cpu(Value, frozen=True):
    """A processor. `vendor` is "AuthenticAMD" or "GenuineIntel", for example. Both fields are empty if unknown."""

    vendor: str = ""
    flags: frozenset[str] = frozenset()


def read(proc_root: Path) -> Cpu | Fault | None:
    """Return the first processor of /proc/cpuinfo; None if there is no such file."""
    text = pseudo_files.read(proc_root / "cpuinfo", "cpuinfo")
    if not isinstance(text, str):
        return text
    rows = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in rows.items()}
    return Cpu(vendor=values.get("vendor_id", ""), flags=frozenset(values.get("flags", "").split()))
