"""Runs one hook without any of the daemon's rights, and ends it with all that it has started.

Started as `python -I -S hook_process.py SECONDS PROGRAM ARGUMENT...`. It imports nothing of hangwatch. It prints the
beginning of what the hook prints, and exits as the hook does. Like timeout(1) it exits with 124 if the hook was ended
at the deadline, with 126 if the hook cannot be run, and with 128 plus the signal if the hook died of one.
"""

from __future__ import annotations

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
    """Drop every capability for good; what is left of them, in words, where that failed.

    Without CAP_SETPCAP the bounding set stays as it is: with no_new_privs no program can gain anything of it, see
    capabilities(7).
    """
    for capability in range(64):
        _LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _LIBC.prctl(_SECUREBITS, _NOROOT_FOR_GOOD, 0, 0, 0)
    _LIBC.prctl(_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    rows = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    left = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(rows[name], 16)]
    return ", ".join(left if rows["NoNewPrivs"].strip() == "1" else [*left, "no NoNewPrivs"])


def run(seconds: float, command: list[str]) -> int:
    """Run the hook for so long at most, and print the beginning of its output; returns the status to exit with."""
    end = time.monotonic() + seconds
    try:
        hook = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
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
    kept, left_out = b"", 0
    while hook.poll() is None and time.monotonic() < end:
        if select.select([output], [], [], _POLL_SECONDS)[0]:
            kept, left_out, is_over = _read(output, kept, left_out)
            if is_over:  # it has closed its output and goes on
                time.sleep(_POLL_SECONDS)
    is_late = hook.poll() is None
    end_descendants()
    if is_late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hook.wait(_END_SECONDS)
    kept, left_out, _ = _read(output, kept, left_out)
    sys.stdout.buffer.write(kept + (b"\n... and more, which is not kept\n" if left_out else b""))
    if is_late:
        return TIMED_OUT
    code = hook.returncode
    return code if code >= 0 else SIGNALLED - code


def _read(output: int, kept: bytes, left_out: int) -> tuple[bytes, int, bool]:
    """What is there by now, a mebibyte at most; kept up to the bound. True where there will be no more."""
    for _ in range(16):
        try:
            part = os.read(output, 1 << 16)
        except BlockingIOError:
            return kept, left_out, False
        if not part:
            return kept, left_out, True
        room = MOST_OUTPUT_BYTES - len(kept)
        kept, left_out = kept + part[:room], left_out + len(part[room:])
    return kept, left_out, False


def end_descendants() -> None:
    """Kill what the hook has left, at whatever depth: it is our child once its parent has ended (a subreaper's)."""
    end = time.monotonic() + _END_SECONDS
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < end and (living := children.read_text().split()):
        for pid in living:
            os.kill(int(pid), signal.SIGKILL)  # it is ours until we have waited for it: nobody else has this pid
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _stop(_number: int, _frame: object) -> NoReturn:
    """The daemon has ended."""
    end_descendants()
    os._exit(TIMED_OUT)


def main() -> NoReturn:
    """Give up all rights, then run what was asked for."""
    signal.signal(signal.SIGTERM, _stop)
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    left = give_up_rights()
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)  # nothing that the hook starts can write into our output, or trace us
    if left:
        sys.stdout.write(f"not run: the daemon's rights could not be given up: {left}\n")
        sys.exit(CANNOT_RUN)
    code = run(float(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
