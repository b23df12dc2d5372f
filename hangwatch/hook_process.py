"""Program that runs one hook without the daemon's capabilities. At the deadline it kills the hook and its descendants.

The daemon starts it as `python -I -S hook_process.py SECONDS PROGRAM ARGUMENT...`. It imports nothing of hangwatch.
It prints the beginning of the hook's output and exits with the hook's status. Three other exit statuses are as in
timeout(1): 124 if the hook was killed at the deadline, 126 if it could not be run, 128 plus the number of the
signal that killed it.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

MOST_OUTPUT_BYTES = 64 << 10
TIMED_OUT, CANNOT_RUN, SIGNALLED = 124, 126, 128
_POLL_SECONDS = 0.05
_END_SECONDS = 2.0
# linux/prctl.h, linux/securebits.h, linux/capability.h
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SECUREBITS, _SUBREAPER, _NO_NEW_PRIVS, _AMBIENT = 1, 4, 24, 28, 36, 38, 47
_AMBIENT_CLEAR_ALL = 4
_NOROOT_FOR_GOOD = 0xEF
_CAPABILITY_VERSION_3 = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)


def give_up_rights() -> str:
    """Drop every capability permanently. Return the names of the capability sets that are still not empty; "" if none.

    Without CAP_SETPCAP the bounding set cannot be changed. With no_new_privs no program can gain a capability from
    it, see capabilities(7).
    """
    for capability in range(64):
        _LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _LIBC.prctl(_SECUREBITS, _NOROOT_FOR_GOOD, 0, 0, 0)
    _LIBC.prctl(_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    rows = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    remaining = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(rows[name], 16)]
    return ", ".join(remaining if rows["NoNewPrivs"].strip() == "1" else [*remaining, "no NoNewPrivs"])


def run(seconds: float, command: list[str]) -> int:
    """Run the hook for at most `seconds`. Print the beginning of its output and return the exit code."""
    end = time.monotonic() + seconds
    try:
        hook = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - there are no threads
        )
    except OSError as error:
        sys.stdout.write(f"{command[0]}: {error.strerror}\n")
        return CANNOT_RUN
    assert hook.stdout is not None
    output = hook.stdout.fileno()
    os.set_blocking(output, False)
    kept, dropped_bytes = b"", 0
    while hook.poll() is None and time.monotonic() < end:
        if select.select([output], [], [], _POLL_SECONDS)[0]:
            kept, dropped_bytes, is_closed = _read(output, kept, dropped_bytes)
            if is_closed:  # the hook closed its output but still runs
                time.sleep(_POLL_SECONDS)
    is_late = hook.poll() is None
    end_descendants()
    if is_late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hook.wait(_END_SECONDS)
    kept, dropped_bytes, _ = _read(output, kept, dropped_bytes)
    sys.stdout.buffer.write(kept + (b"\n... the rest of the output was dropped\n" if dropped_bytes else b""))
    if is_late:
        return TIMED_OUT
    code = hook.returncode
    return code if code >= 0 else SIGNALLED - code


def _read(output: int, kept: bytes, dropped_bytes: int) -> tuple[bytes, int, bool]:
    """Read the available output, at most 1 MiB, and keep up to MOST_OUTPUT_BYTES of it.

    Return the kept bytes, the number of dropped bytes, and True if the hook has closed its output.
    """
    for _ in range(16):
        try:
            part = os.read(output, 1 << 16)
        except BlockingIOError:
            return kept, dropped_bytes, False
        if not part:
            return kept, dropped_bytes, True
        room = MOST_OUTPUT_BYTES - len(kept)
        kept, dropped_bytes = kept + part[:room], dropped_bytes + len(part[room:])
    return kept, dropped_bytes, False


def end_descendants() -> None:
    """Kill all descendants of the hook.

    This process is a subreaper: if the parent of a descendant ends, the kernel makes this process the parent.
    """
    end = time.monotonic() + _END_SECONDS
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < end and (living := children.read_text().split()):
        for pid in living:
            os.kill(int(pid), signal.SIGKILL)  # a pid cannot be reused before its parent has waited for it
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _stop(_number: int, _frame: object) -> NoReturn:
    """Handle SIGTERM, which the kernel sends when the daemon ends: kill the hook and exit."""
    end_descendants()
    os._exit(TIMED_OUT)


def main() -> NoReturn:
    """Drop all capabilities, then run the hook."""
    signal.signal(signal.SIGTERM, _stop)
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    remaining = give_up_rights()
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)  # no process of the hook can write into this process's output or trace it
    if remaining:
        sys.stdout.write(f"not run: the daemon's capabilities could not be dropped: {remaining}\n")
        sys.exit(CANNOT_RUN)
    code = run(float(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
