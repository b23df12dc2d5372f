"""Read NCCL's own progress counts of a job through its RAS socket. See "RAS" in NCCL's user guide and src/ras/.

A child joins the job's network namespace and connects to a socket on which a rank of the job listens. Only the port
number is taken from the environment, since any process can listen on 28028. The answer comes from the job and may be
false. Its bytes and seconds are limited.
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
from itertools import chain
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
STARVED_SECONDS = 6.0  # a child that waits for a CPU does not wait for NCCL
_LIBRARY = re.compile(r"/libnccl\.so")

_ABSENT = frozenset({"NoListener", "RasDisabled"})
_VARIABLES = ("NCCL_RAS_ENABLE", "NCCL_RAS_ADDR")
_MOST_RANKS = 256
_RUNNER = child.Runner("client of NCCL RAS", waits_for_place=False)
_REMEDIES = {
    "not_permitted": "run as root, or grant CAP_SYS_ADMIN: it is in another network namespace",
    "too_large": "run ncclras on the node of the job",
}
_REASONS = {
    "not_permitted": ("PermissionDenied", "hangwatch is not permitted to join its network namespace"),
    "no_answer": ("NoAnswer", f"it did not respond completely within {ASK_SECONDS:.0f} s"),
    "refused": ("NotReached", "it refused or closed the connection"),
    "garbage": ("BadAnswer", "the listening process does not use the protocol of NCCL's RAS"),
    "too_large": ("TooLarge", f"the answer exceeds {MOST_BYTES >> 20} MiB"),
}


class RasEndpoint(NamedTuple):
    """The RAS socket of a job. `inode` identifies the socket in the network namespace of `process`."""

    process: ProcessId
    address: str
    port: int
    inode: int


def ranks_by_nccl_name(ranks: Sequence[ProcessId], proc_root: Path) -> dict[tuple[str, int], ProcessId]:
    """Return the ranks, keyed by the names that NCCL may use. A name that fits two ranks is dropped.

    A name is an address in the rank's network namespace, and the rank's pid in its pid namespace.
    """
    spaces, found = NamespaceCache(proc_root), dict[tuple[str, int], list[ProcessId]]()
    for rank in ranks:
        inner = procfs.read_inner_pid(rank.pid, proc_root)
        for address in spaces.addresses(rank.pid):
            found.setdefault((address, inner), []).append(rank)
    return {name: ranks_of_name[0] for name, ranks_of_name in found.items() if len(ranks_of_name) == 1}


def find_endpoint(ranks: Sequence[ProcessId], proc_root: Path) -> RasEndpoint | Fault:
    """Return the first socket of a rank that listens on the RAS port at an address of its own namespace.

    Return a fault if there is none.
    """
    spaces, fault = NamespaceCache(proc_root), _fault("NoListener", NOBODY)
    for rank in ranks[:_MOST_RANKS]:
        variables = proc_pid.variables(proc_root, rank.pid, _VARIABLES)
        if not isinstance(variables, dict):
            fault = variables or fault
            continue
        if variables.get("NCCL_RAS_ENABLE") == "0":
            fault = _fault("RasDisabled", "its environment sets NCCL_RAS_ENABLE=0")
            continue
        port = _port(variables.get("NCCL_RAS_ADDR"))
        listener = find_listener(rank, port, spaces.held(ranks), spaces) if port is not None else None
        if isinstance(listener, RasEndpoint):
            return listener
        fault = listener or fault
    return fault


NOBODY = (
    f"none of its ranks listens on the port of NCCL_RAS_ADDR (default {PORT}): NCCL is older than 2.24 or has no RAS"
)


def _port(value: str | None) -> int | None:
    """Return the port of NCCL_RAS_ADDR; None if the value has no valid port."""
    if value is None:
        return PORT
    digits = value.rpartition(":")[2]
    is_port = digits.isascii() and digits.isdecimal() and len(digits) < 6 and 0 < int(digits) < 1 << 16
    return int(digits) if is_port else None


class NamespaceCache:
    """A cache of addresses and listeners by network namespace, and of the sockets of all ranks."""

    def __init__(self, proc_root: Path) -> None:
        self._root = proc_root
        self._addresses: dict[str | None, frozenset[str]] = {}
        self._listeners: dict[tuple[str | None, int], list[sockets.Connection]] = {}
        self._held: frozenset[int] | None = None

    def addresses(self, pid: int) -> frozenset[str]:
        """Return the addresses of the namespace of a process."""
        space = proc_pid.namespace(self._root, pid, "net")
        if space is None or space not in self._addresses:
            self._addresses[space] = interfaces.read_addresses(self._root / str(pid) / "net")
        return self._addresses[space]

    def listeners(self, pid: int, port: int) -> list[sockets.Connection]:
        """Return the sockets that listen on a port in the namespace of a process."""
        space = proc_pid.namespace(self._root, pid, "net")
        if space is None or (space, port) not in self._listeners:
            at_port = sockets.list_connections(self._root / str(pid) / "net", port)
            self._listeners[space, port] = [each for each in at_port if each.listens and each.local[1] == port]
        return self._listeners[space, port]

    def held(self, ranks: Sequence[ProcessId]) -> frozenset[int]:
        """Return the inodes of all sockets of the ranks."""
        if self._held is None:
            inodes = ((sockets.sockets_of_process(rank.pid, self._root) or {}).values() for rank in ranks[:_MOST_RANKS])
            self._held = frozenset(chain.from_iterable(inodes))
        return self._held


def find_listener(
    rank: ProcessId, port: int, held: Collection[int], spaces: NamespaceCache
) -> RasEndpoint | Fault | None:
    """Return the RAS socket on this port among the inodes `held` by ranks; None if no process listens.

    Return a fault if another process listens at the same address or port, or if the address is not one of the rank's.
    """
    listeners = spaces.listeners(rank.pid, port)
    for listener in (each for each in listeners if each.inode in held):
        if any(other.local[0] == listener.local[0] and other.inode not in held for other in listeners):
            detail = (
                f"another process, not a rank, also listens at {sockets.format_end(listener.local)}: either may answer"
            )
            return _fault("AnothersListener", detail)
        address = ipaddress.ip_address(listener.local[0])
        if address.is_unspecified:
            return RasEndpoint(rank, "127.0.0.1" if address.version == 4 else "::1", port, listener.inode)
        if address.is_loopback or str(address) in spaces.addresses(rank.pid):
            return RasEndpoint(rank, str(address), port, listener.inode)
        return _fault(
            "NotOwnAddress",
            f"it listens at {sockets.format_end(listener.local)}, which is not one of its addresses",
        )
    if listeners:
        return _fault("AnothersListener", f"the process that listens on port {port} is not a rank")
    return None


def collect_statuses(
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
    """Return at least two answers, at most `wanted`, each with its time (CLOCK_MONOTONIC seconds).

    They are `pause_seconds` apart, and no request starts after `end`. None for a job without NCCL. A fault states why
    there are fewer than two answers.
    """
    endpoint = find_endpoint(ranks, proc_root)
    if isinstance(endpoint, Fault):
        return endpoint if endpoint.reason not in _ABSENT or has_nccl(ranks, proc_root) else None
    if (youngest := youngest_age_seconds(ranks)) < min_age_seconds:
        return _fault(
            "TooYoung", f"one of its ranks started {youngest:.0f} s ago: NCCL is not queried while a job starts"
        )
    statuses: list[tuple[float, RasStatus]] = []
    form: Form = "json"
    fault = _fault("TooFewAnswers", "there was time for only one answer; two are needed")
    for number in range(wanted):
        began = time.monotonic()
        if began >= end or stop.is_set():
            break
        status = ask_status(endpoint, share, min(ASK_SECONDS, end - began), stop, proc_root, form=form)
        if isinstance(status, Fault) and status.reason == "TooLarge" and form == "json" and time.monotonic() < end:
            form = "text"  # lists only ranks that differ: a few lines for thousands of ranks
            status = ask_status(endpoint, share, min(ASK_SECONDS, end - time.monotonic()), stop, proc_root, form=form)
        if isinstance(status, Fault):
            fault = status
            break
        statuses.append((time.monotonic(), status))
        pause = began + pause_seconds - time.monotonic()
        if number + 1 < wanted and (time.monotonic() + pause >= end or stop.wait(max(0.0, pause))):
            break
    return statuses if len(statuses) > 1 else fault


def ask_status(
    endpoint: RasEndpoint, share: str, seconds: float, stop: threading.Event, proc_root: Path, *, form: Form = "json"
) -> RasStatus | Fault:
    """Return one answer of the RAS socket, if the same process listens there before and after it.

    The answer is JSON if NCCL supports that and `form` is "json".
    """
    with contextlib.ExitStack() as stack:
        try:
            namespace = os.open(f"{proc_root}/{endpoint.process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, namespace)
            is_ours = os.path.sameopenfile(namespace, stack.enter_context(open("/proc/self/ns/net", "rb")).fileno())  # noqa: PTH123 - a magic link
        except OSError as error:
            return _fault("ProcessGone", str(error.strerror or error))
        if not _is_listening(endpoint, proc_root):
            return _fault("NotReached", "it has ended or no longer listens there")
        raw = _run_child(endpoint, -1 if is_ours else namespace, share, seconds, stop, form=form)
        if isinstance(raw, Fault):
            return raw
        if not _is_listening(endpoint, proc_root):
            return _fault("NotReached", "it ended while it answered")
    try:
        return parse(raw)
    except BadAnswerError as error:
        return _fault("BadAnswer", str(error)[:200])


def _is_listening(endpoint: RasEndpoint, proc_root: Path) -> bool:
    at_port = sockets.list_connections(proc_root / str(endpoint.process.pid) / "net", endpoint.port)
    is_held = any(connection.inode == endpoint.inode for connection in at_port)
    return is_held and procfs.is_alive(endpoint.process, proc_root)


def _run_child(
    endpoint: RasEndpoint, space: int, share: str, seconds: float, stop: threading.Event, *, form: Form
) -> bytes | Fault:
    """Return the child's answer. The child is killed if it takes too long or if `stop` is set."""
    where = {"space": space, "address": endpoint.address, "port": endpoint.port}
    question = json.dumps({**where, "seconds": seconds, "most_bytes": MOST_BYTES, "form": form})
    printed = _RUNNER.run(
        [sys.executable, "-I", "-S", str(CHILD), question],
        endpoint.process,
        share=share,
        deadline_seconds=seconds + STARVED_SECONDS,
        stop=stop,
        pass_fds=() if space < 0 else (space,),
    )
    if isinstance(printed, Fault) and printed.reason in ("CannotStart", "TooManyDumpersStuck"):
        return _fault("NoAnswer", printed.detail)
    outcome, _, answer = (b"" if isinstance(printed, Fault) else printed.out).partition(b"\n")
    if outcome == b"answer":
        return answer
    reason, detail = _REASONS.get(outcome.decode("ascii", "replace"), _REASONS["no_answer"])
    return _fault(reason, detail, _REMEDIES.get(outcome.decode("ascii", "replace"), ""))


OFF = Fault(
    subject="NCCL RAS",
    reason="SwitchedOff",
    detail="nccl_ras is off",
    remedy="if NCCL is 2.29.2 or later, set nccl_ras = true in [capture] of the configuration",
)
"""The fault reported while `nccl_ras` is off."""


def has_nccl(ranks: Sequence[ProcessId], proc_root: Path) -> bool:
    """True if the first of these ranks has NCCL mapped."""
    found = proc_pid.mapped_files(proc_root, ranks[0].pid, _LIBRARY) if ranks else ()
    return isinstance(found, tuple) and bool(found)


def youngest_age_seconds(ranks: Sequence[ProcessId]) -> float:
    """Return the age of the youngest rank; 0 without ranks."""
    now = time.monotonic()
    return min((now - rank.start_ticks / procfs.TICKS_PER_SECOND for rank in ranks), default=0.0)


def _fault(reason: str, detail: str, remedy: str = "") -> Fault:
    return Fault(subject="NCCL RAS", reason=reason, detail=detail, remedy=remedy)
