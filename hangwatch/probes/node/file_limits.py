"""Read from configuration files the open-file limits of a new login and of a new systemd unit.

See limits.conf(5), pam_limits(8), systemd-system.conf(5) and setrlimit(2). No process is started to test the limits.
`LimitNOFILE=` of a unit, or a line for one user or group, may set other limits.
"""

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from hangwatch.formats import bounded_read
from hangwatch.model import Value
from hangwatch.probes import pseudo_files
from hangwatch.probes.process.proc_pid import FileLimit

_MOST_FILES = 64  # of one folder
_MOST_BYTES = 1 << 16  # of one file
_OF_SYSTEMD = FileLimit(soft=1024, hard=524288)  # default since version 240
_SYSTEMD_ROOTS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
_DEFAULT = re.compile(r"\s*DefaultLimitNOFILE\s*=\s*(.*?)\s*")
_SIZE = re.compile(r"(\d{1,18})([KMG]?)")
_LIMIT = re.compile(r"\s*(\S+)\s+(soft|hard|-)\s+nofile\s+(\S+)\s*(?:#.*)?")
_UNLIMITED = frozenset({"unlimited", "infinity", "-1"})


class NewProcess(Value, frozen=True):
    """The open-file limits of a new process, and the file that sets them.

    The limits are capped at fs.nr_open; inf means no limit. `kind` is the kind of process. `others` counts the lines
    for single users or groups, which get other limits.
    """

    kind: str
    soft: float
    hard: float
    source: str
    others: int = 0


def read(file_root: Path, proc_root: Path) -> tuple[NewProcess, ...]:
    """Return the limits of a systemd unit if systemd is process 1, and of a login if PAM applies limits.conf.

    A login starts with the limits of a unit. Unreadable files are ignored. Empty if process 1 has another root than
    `file_root`, as seen from a container.
    """
    if not _has_etc_of_process_1(file_root, proc_root):
        return ()
    comm = pseudo_files.read(proc_root / "1" / "comm", "pid 1")
    unit = _unit(file_root) if isinstance(comm, str) and comm.strip() == "systemd" else None
    login = _login(file_root, unit) if _applies_limits(file_root) else None
    number = pseudo_files.number(pseudo_files.read(proc_root / "sys" / "fs" / "nr_open", "fs.nr_open"))
    max_limit = math.inf if number is None else number
    processes = [process for process in (unit, login) if process is not None]
    return tuple(replace(each, soft=min(each.soft, max_limit), hard=min(each.hard, max_limit)) for each in processes)


def _unit(file_root: Path) -> NewProcess:
    limit, source = _OF_SYSTEMD, "systemd's own default"
    for path, line in _lines(_systemd_files(file_root)):
        match = _DEFAULT.fullmatch(line)
        configured = parse_default(match[1]) if match else None
        limit, source = (configured, _name(path, file_root)) if configured else (limit, source)
    return NewProcess("a systemd unit", limit.soft, limit.hard, source)


def _login(file_root: Path, unit: NewProcess | None) -> NewProcess | None:
    """Return the limits from the lines for all users (`*`); None if a limit is unknown."""
    soft, hard, source = (unit.soft, unit.hard, unit.source) if unit else (None, None, "")
    others, folder = 0, file_root / "etc" / "security"
    for path, line in _lines([folder / "limits.conf", *_conf_files(folder / "limits.d")]):
        match = _LIMIT.fullmatch(line)
        value = _number(match[3]) if match else None
        if match is None or value is None:
            continue
        if match[1] != "*":
            others += 1
            continue
        soft = value if match[2] in ("soft", "-") else soft
        hard = value if match[2] in ("hard", "-") else hard
        source = _name(path, file_root)
    if soft is None or hard is None:
        return None
    return NewProcess("a login", min(soft, hard), hard, source, others)


def _has_etc_of_process_1(file_root: Path, proc_root: Path) -> bool:
    """True if process 1 has the same /etc, or if its root is not readable."""
    try:
        return (proc_root / "1" / "root" / "etc").samefile(file_root / "etc")
    except OSError:
        return True


def parse_default(text: str) -> FileLimit | None:
    """Parse `DefaultLimitNOFILE=`: one value for both limits, or `soft:hard`; None if invalid."""
    first, colon, second = text.partition(":")
    soft, hard = _number(first), _number(second if colon else first)
    return None if soft is None or hard is None else FileLimit(soft=soft, hard=hard)


def _number(word: str) -> float | None:
    if word in _UNLIMITED:
        return math.inf
    match = _SIZE.fullmatch(word)
    return float(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]) if match else None


def _systemd_files(file_root: Path) -> Iterator[Path]:
    """Yield the main file, then the drop-ins sorted by name.

    Of files with the same name, only the one in the first folder of `_SYSTEMD_ROOTS` is used.
    """
    roots = [file_root / root for root in _SYSTEMD_ROOTS]
    main = next((root / "system.conf" for root in roots if (root / "system.conf").is_file()), None)
    if main is not None:
        yield main
    by_name: dict[str, Path] = {}
    for root in roots:
        for path in _conf_files(root / "system.conf.d"):
            by_name.setdefault(path.name, path)
    yield from (by_name[name] for name in sorted(by_name))


def _applies_limits(file_root: Path) -> bool:
    """True if any PAM service uses pam_limits. Otherwise limits.conf has no effect."""
    folder = file_root / "etc" / "pam.d"
    names = pseudo_files.names(folder, "services of PAM")
    files = [folder / name for name in names[:_MOST_FILES]] if isinstance(names, tuple) else []
    return any("pam_limits.so" in line.partition("#")[0] for _, line in _lines(files))


def _conf_files(folder: Path) -> list[Path]:
    names = pseudo_files.names(folder, "drop-ins")
    found = [folder / name for name in names if name.endswith(".conf")] if isinstance(names, tuple) else []
    return found[:_MOST_FILES]


def _lines(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the file and text of each line, except comments. Files that cannot be read are skipped."""
    for path in itertools.islice(paths, _MOST_FILES):
        try:
            content = bounded_read.read(path, _MOST_BYTES, flags=os.O_NONBLOCK)
        except bounded_read.FileError:
            continue
        for line in content.decode("utf-8", "replace").splitlines():
            if not line.lstrip().startswith(("#", ";")):
                yield path, line


def _name(path: Path, file_root: Path) -> str:
    return f"/{path.relative_to(file_root)}"
