"""NCCL's RAS: how far NCCL itself says that its ranks are. See "RAS" in NCCL's user guide, src/ras/ for the protocol.

Asked is a socket that a rank of the job listens on, in its network namespace, by a child that joins that one: of the
environment nothing is believed but the number of the port, for anybody can listen on 28028. Who answers is the job, and
can say of itself what it likes; bytes and seconds are bounded.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from hangwatch.formats.nccl_ras_status import MOST_BYTES, BadAnswerError, RasStatus, parse
from hangwatch.model import Fault, ProcessId
from hangwatch.probes import child
from hangwatch.probes.network import interfaces, sockets
from hangwatch.probes.process import proc_pid, procfs

CHILD = Path(__file__).with_name("nccl_ras_child.py")
PORT = 28028
Form: TypeAlias = Literal["json", "text"]
ASK_SECONDS = 8.0  # RAS itself waits 5 s for a rank
STARVED_SECONDS = 6.0  # a child that waits for a core does not wait for NCCL
_LIBRARY = re.compile(r"/libnccl\.so")

_ABSENT = frozenset({"NoListener", "RasDisabled"})
_VARIABLES = ("NCCL_RAS_ENABLE", "NCCL_RAS_ADDR")
_MOST_RANKS = 256
_RUNNER = child.Runner("child that asks NCCL", waits_for_place=False)
_REMEDIES = {
    "not_permitted": "run as root, or grant CAP_SYS_ADMIN: it is in another network namespace",
    "too_large": "for people: ncclras, on the node of the job",
}
_REASONS = {
    "not_permitted": ("PermissionDenied", "its network namespace may not be joined"),
    "no_answer": ("NoAnswer", f"no whole answer within {ASK_SECONDS:.0f} s"),
    "refused": ("NotReached", "it did not let itself be connected to, or broke off"),
    "garbage": ("BadAnswer", "what listens there does not speak the protocol of NCCL's RAS"),
    "too_large": ("TooLarge", f"more than {MOST_BYTES >> 20} MiB were answered"),
}


class Door(NamedTuple):
    """Where RAS of a job is asked: at the socket of this inode, in the network namespace of this process."""

    process: ProcessId
    address: str
    port: int
    inode: int


def names(ranks: Sequence[ProcessId], proc_root: Path) -> dict[tuple[str, int], ProcessId]:
    """These ranks by what NCCL may call them: an address of their network namespace, their pid in their own.

    Where two would be called alike, neither is.
    """
    spaces, found = Spaces(proc_root), dict[tuple[str, int], list[ProcessId]]()
    for rank in ranks:
        inner = procfs.read_inner_pid(rank.pid, proc_root)
        for address in spaces.addresses(rank.pid):
            found.setdefault((address, inner), []).append(rank)
    return {name: called[0] for name, called in found.items() if len(called) == 1}


def door(ranks: Sequence[ProcessId], proc_root: Path) -> Door | Fault:
    """The first socket of a rank that listens where RAS should, at an address of its own namespace."""
    spaces, why = Spaces(proc_root), _fault("NoListener", NOBODY)
    for rank in ranks[:_MOST_RANKS]:
        variables = proc_pid.variables(proc_root, rank.pid, _VARIABLES)
        if not isinstance(variables, dict):
            why = variables or why
            continue
        if variables.get("NCCL_RAS_ENABLE") == "0":
            why = _fault("RasDisabled", "its environment says NCCL_RAS_ENABLE=0")
            continue
        port = _port(variables.get("NCCL_RAS_ADDR"))
        found = listening(rank, port, spaces.held(ranks), spaces) if port is not None else None
        if isinstance(found, Door):
            return found
        why = found or why
    return why


NOBODY = f"no rank of it listens at the port of NCCL_RAS_ADDR, else {PORT}: an NCCL older than 2.24, or without RAS"


def _port(told: str | None) -> int | None:
    """The port of an address as somebody wrote it, None where that holds none."""
    if told is None:
        return PORT
    digits = told.rpartition(":")[2]
    is_port = digits.isascii() and digits.isdecimal() and len(digits) < 6 and 0 < int(digits) < 1 << 16
    return int(digits) if is_port else None


class Spaces:
    """What is read once for each network namespace, and once of all ranks."""

    def __init__(self, proc_root: Path) -> None:
        self._root = proc_root
        self._addresses: dict[str | None, frozenset[str]] = {}
        self._listeners: dict[tuple[str | None, int], list[sockets.Connection]] = {}
        self._held: frozenset[int] | None = None

    def addresses(self, pid: int) -> frozenset[str]:
        """The addresses of the namespace of a process."""
        space = proc_pid.namespace(self._root, pid, "net")
        if space is None or space not in self._addresses:
            self._addresses[space] = interfaces.addresses(self._root / str(pid) / "net")
        return self._addresses[space]

    def listeners(self, pid: int, port: int) -> list[sockets.Connection]:
        """Who listens on a port in the namespace of a process."""
        space = proc_pid.namespace(self._root, pid, "net")
        if space is None or (space, port) not in self._listeners:
            at_port = sockets.listed(self._root / str(pid) / "net", port)
            self._listeners[space, port] = [one for one in at_port if one.listens and one.local[1] == port]
        return self._listeners[space, port]

    def held(self, ranks: Sequence[ProcessId]) -> frozenset[int]:
        """The inodes of all sockets of the ranks."""
        if self._held is None:
            every = (sockets.held_by(rank.pid, self._root) or {} for rank in ranks[:_MOST_RANKS])
            self._held = frozenset(inode for one in every for inode in one.values())
        return self._held


def listening(rank: ProcessId, port: int, held: Collection[int], spaces: Spaces) -> Door | Fault | None:
    """Where one of the sockets of these inodes listens on a port of its network, if nobody else does there."""
    listeners = spaces.listeners(rank.pid, port)
    for own in (one for one in listeners if one.inode in held):
        if any(one.local[0] == own.local[0] and one.inode not in held for one in listeners):
            detail = f"a process that is no rank of it listens at {sockets.words_of(own.local)}, too: either may answer"
            return _fault("AnothersListener", detail)
        address = ipaddress.ip_address(own.local[0])
        if address.is_unspecified:
            return Door(rank, "127.0.0.1" if address.version == 4 else "::1", port, own.inode)
        if address.is_loopback or str(address) in spaces.addresses(rank.pid):
            return Door(rank, str(address), port, own.inode)
        return _fault("NotOwnAddress", f"it listens at {sockets.words_of(own.local)}, which is no address of its own")
    if listeners:
        return _fault("AnothersListener", f"who listens on port {port} is no rank of it")
    return None


def answers(
    ranks: Sequence[ProcessId],
    share: str,
    *,
    wanted: int,
    pause_seconds: float,
    min_age_seconds: float,
    end: float,
    stop: threading.Event,
    proc_root: Path,
) -> list[tuple[float, RasStatus]] | Fault | None:
    """So many answers, this far from each other, each with when it came (CLOCK_MONOTONIC); two at least, until `end`.

    None of a job that has no NCCL, else the fault says why there are fewer.
    """
    asked = door(ranks, proc_root)
    if isinstance(asked, Fault):
        return asked if asked.reason not in _ABSENT or has_nccl(ranks, proc_root) else None
    if (youngest := youngest_seconds(ranks)) < min_age_seconds:
        return _fault("TooYoung", f"a rank of it began {youngest:.0f} s ago: NCCL is not asked while a job starts")
    found: list[tuple[float, RasStatus]] = []
    form: Form = "json"
    why = _fault("TooFewAnswers", "there was time for one answer, and one tells nothing")
    for number in range(wanted):
        began = time.monotonic()
        if began >= end or stop.is_set():
            break
        status = ask(asked, share, min(ASK_SECONDS, end - began), stop, proc_root, form=form)
        if isinstance(status, Fault) and status.reason == "TooLarge" and form == "json" and time.monotonic() < end:
            form = "text"  # which lists only ranks that differ: a few lines of thousands of ranks
            status = ask(asked, share, min(ASK_SECONDS, end - time.monotonic()), stop, proc_root, form=form)
        if isinstance(status, Fault):
            why = status
            break
        found.append((time.monotonic(), status))
        pause = began + pause_seconds - time.monotonic()
        if number + 1 < wanted and (time.monotonic() + pause >= end or stop.wait(max(0.0, pause))):
            break
    return found if len(found) > 1 else why


def ask(
    asked: Door, share: str, seconds: float, stop: threading.Event, proc_root: Path, *, form: Form = "json"
) -> RasStatus | Fault:
    """One answer, of the process that was found before, and listens there before and after.

    It is JSON where NCCL has that, and `form` is no other.
    """
    with contextlib.ExitStack() as stack:
        try:
            space = os.open(f"{proc_root}/{asked.process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, space)
            is_ours = os.path.sameopenfile(space, stack.enter_context(open("/proc/self/ns/net", "rb")).fileno())  # noqa: PTH123 - a magic link
        except OSError as error:
            return _fault("ProcessGone", str(error.strerror or error))
        if not _is_there(asked, proc_root):
            return _fault("NotReached", "it has ended, or does not listen there any more")
        raw = _answered(asked, -1 if is_ours else space, share, seconds, stop, form=form)
        if isinstance(raw, Fault):
            return raw
        if not _is_there(asked, proc_root):
            return _fault("NotReached", "it ended while it was asked")
    try:
        return parse(raw)
    except BadAnswerError as error:
        return _fault("BadAnswer", str(error)[:200])


def _is_there(asked: Door, proc_root: Path) -> bool:
    now = procfs.read_state(asked.process.pid, proc_root)
    at_port = sockets.listed(proc_root / str(asked.process.pid) / "net", asked.port)
    return now is not None and now[0] == asked.process and any(one.inode == asked.inode for one in at_port)


def _answered(
    asked: Door, space: int, share: str, seconds: float, stop: threading.Event, *, form: Form
) -> bytes | Fault:
    """What the child brings; it is ended where it takes longer than it should, or `stop` is set."""
    where = {"space": space, "address": asked.address, "port": asked.port}
    question = json.dumps({**where, "seconds": seconds, "most_bytes": MOST_BYTES, "form": form})
    printed = _RUNNER.run(
        [sys.executable, "-I", "-S", str(CHILD), question],
        asked.process,
        share=share,
        deadline_seconds=seconds + STARVED_SECONDS,
        stop=stop,
        pass_fds=() if space < 0 else (space,),
    )
    if isinstance(printed, Fault) and printed.reason in ("CannotStart", "TooManyDumpersStuck"):
        return _fault("NoAnswer", printed.detail)
    how, _, answer = (b"" if isinstance(printed, Fault) else printed.out).partition(b"\n")
    if how == b"answer":
        return answer
    reason, detail = _REASONS.get(how.decode("ascii", "replace"), _REASONS["no_answer"])
    return _fault(reason, detail, _REMEDIES.get(how.decode("ascii", "replace"), ""))


OFF = Fault(
    subject="NCCL RAS",
    reason="SwitchedOff",
    detail="nccl_ras is off",
    remedy="with NCCL 2.29.2 or later, in the configuration, under [capture]: nccl_ras = true",
)
"""Why NCCL is not asked where that is switched off."""


def has_nccl(ranks: Sequence[ProcessId], proc_root: Path) -> bool:
    """Whether the first of these ranks has NCCL mapped."""
    found = proc_pid.mapped_files(proc_root, ranks[0].pid, _LIBRARY) if ranks else ()
    return isinstance(found, tuple) and bool(found)


def youngest_seconds(ranks: Sequence[ProcessId]) -> float:
    """How long the youngest of these has lived."""
    now = time.monotonic()
    return min((now - rank.start_ticks / procfs.TICKS_PER_SECOND for rank in ranks), default=0.0)


def _fault(reason: str, detail: str, remedy: str = "") -> Fault:
    return Fault(subject="NCCL RAS", reason=reason, detail=detail, remedy=remedy)
