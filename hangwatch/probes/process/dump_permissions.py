"""Read the rights of this process to dump others: capabilities, ptrace restrictions, py-spy. See ptrace(2)."""

import os
from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes.base import pseudo_files
from hangwatch.probes.process import proc_pid, pyspy

# Bits of CapEff, <linux/capability.h>, for the capabilities that hangwatch uses.
CAPABILITIES = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYSLOG": 34}


class Rights(Value, frozen=True):
    """The rights of this process.

    `ptrace_scope` is yama's value 0 to 3; None without yama. `pyspy_path` is None if py-spy was not found, and
    `pyspy_version` (`pyspy.version`) if it cannot be started.
    """

    user_id: int
    capabilities: tuple[str, ...]
    ptrace_scope: int | None
    seccomp_filter: bool
    pyspy_version: tuple[int, ...] | None
    pyspy_path: str | None


def read_rights(proc_root: Path) -> Rights | Fault | None:
    """Return the rights from /proc/self/status and kernel.yama.ptrace_scope, and the path of py-spy."""
    rows = proc_pid.status(proc_root, "self")
    if not isinstance(rows, dict):
        return rows
    effective = int(rows.get("CapEff", "0"), 16)
    words = rows.get("Uid", "").split()
    scope = pseudo_files.read(proc_root / "sys" / "kernel" / "yama" / "ptrace_scope", "yama")
    program = pyspy.find()
    return Rights(
        user_id=int(words[1]) if len(words) > 1 else os.geteuid(),
        capabilities=tuple(name for name, bit in CAPABILITIES.items() if effective >> bit & 1),
        ptrace_scope=pseudo_files.number(scope),
        seccomp_filter=rows.get("Seccomp") == "2",
        pyspy_version=None if program is None else pyspy.version(program),
        pyspy_path=None if program is None else str(program),
    )


def may_attach(proc_root: Path, pid: int) -> bool | None:
    """True if the kernel allows this process to ptrace process `pid`; None if it is gone.

    Opening /proc/PID/mem checks the right that ptrace and process_vm_readv need (PTRACE_MODE_ATTACH). It does nothing
    to the process.
    """
    try:
        os.close(os.open(proc_root / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return None if error.errno in pseudo_files.ABSENT else False
    return True
