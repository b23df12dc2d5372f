"""Read the ends of the regular files that ranks write to, through /proc/PID/fd/1 and 2.

A file system may not respond, so one child per file system reads them. See proc_pid_fd(5).
"""

import marshal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hangwatch import words
from hangwatch.limits import LONGEST_PATH
from hangwatch.model import Fault, OutputEnd, ProcessId
from hangwatch.probes.base import child_runner, filesystems, procfs, pseudo_files

CHILD = Path(__file__).with_name("rank_output_child.py")
MOST_BYTES = 64 << 10  # of one file
MOST_BYTES_OF_ALL = 4 << 20
FEWEST_BYTES = 4 << 10
_MOST_MOUNTS = 8
_PARALLEL = 4
_DELETED = " (deleted)"
RUNNER = child_runner.Runner("reader of logs")


def read(
    targets: Mapping[ProcessId, int],
    *,
    share: str,
    deadline_seconds: float,
    stop: threading.Event | None = None,
    proc_root: Path = procfs.PROC,
) -> tuple[dict[ProcessId, tuple[OutputEnd, ...]], tuple[Fault, ...]]:
    """Return the ends of the output files of these processes, and faults of file systems that do not respond.

    `targets` maps processes to the user id that must own a file. Other files, pipes, terminals and devices are not
    read. At most 64 KiB per file are read, less if there are many files, and at most 8 file systems. `share` as in
    `Job`.
    """
    by_mount: dict[str, dict[ProcessId, dict[int, str]]] = {}
    for target in targets:
        for descriptor, (device, path) in _files(target, proc_root).items():
            by_mount.setdefault(device, {}).setdefault(target, {})[descriptor] = path
    most_bytes = max(FEWEST_BYTES, min(MOST_BYTES, MOST_BYTES_OF_ALL // max(1, len(targets))))
    ends: dict[ProcessId, tuple[OutputEnd, ...]] = {}
    faults: list[Fault] = []
    end = time.monotonic() + deadline_seconds

    def read_mount(files: Mapping[ProcessId, Mapping[int, str]]) -> child_runner.Printed | Fault:
        arguments = [f"{target.pid}:{targets[target]}:{','.join(map(str, paths))}" for target, paths in files.items()]
        return RUNNER.run(
            [sys.executable, "-I", "-S", str(CHILD), str(most_bytes), *arguments],
            next(iter(files)),
            share=share,
            deadline_seconds=max(0.0, end - time.monotonic()),
            stop=stop,
        )

    per_mount = [files for files in by_mount.values() if RUNNER.refusal(next(iter(files))) is None][:_MOST_MOUNTS]
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="outputs") as pool:
        for files, printed in zip(per_mount, pool.map(read_mount, per_mount), strict=True):
            if isinstance(printed, Fault):
                faults.append(printed)
            elif printed.code == 0:
                for target, end_of_file in _ends(printed.out, files):
                    ends[target] = (*ends.get(target, ()), end_of_file)
    return {target: files for target, files in ends.items() if procfs.is_alive(target, proc_root)}, tuple(faults)


def _files(target: ProcessId, proc_root: Path) -> dict[int, tuple[str, str]]:
    """Return the device and path of standard output and error, if they are files. No file is touched."""
    found = {}
    for descriptor in (1, 2):
        path = pseudo_files.read_link(f"{proc_root}/{target.pid}/fd/{descriptor}")
        if path.startswith("/") and not path.startswith("/dev/"):
            mount = filesystems.mount_of(proc_root, target.pid, descriptor)
            found[descriptor] = (mount.device if mount else "", path)
    return found


def _ends(raw: bytes, files: Mapping[ProcessId, Mapping[int, str]]) -> Iterator[tuple[ProcessId, OutputEnd]]:
    by_pid = {target.pid: target for target in files}
    for pid, descriptor, identity, size, end in marshal.loads(raw):  # noqa: S302 - from our own child
        target = by_pid[pid]
        path = files[target][descriptor]
        yield (
            target,
            OutputEnd(
                file=identity,
                path=words.elided(path.removesuffix(_DELETED), LONGEST_PATH),
                is_deleted=path.endswith(_DELETED),
                size_bytes=size,
                text=end,
            ),
        )
