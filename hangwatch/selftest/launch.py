"""Starts the ranks of a self-test on this node, listens to them, and ends all that it started."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from hangwatch import words
from hangwatch.formats import decoding
from hangwatch.model import Value
from hangwatch.selftest.outcome import Event
from hangwatch.tables import nccl_messages

SCRIPT = Path(__file__).with_name("rank.py")
START_SECONDS = 120.0
"""How long ranks may say nothing until all have said who they are: torch is large, file systems are slow."""

_GRACE_SECONDS = 3.0
_LINE_CHARACTERS = 64 << 10
_MOST_EVENTS = 1 << 18

Say = Callable[[str], None]


class Plan(Value, frozen=True):
    """How the ranks are started. `sees_gpus`: each is shown the GPU of its device alone, by CUDA_VISIBLE_DEVICES."""

    python: str
    backend: str = "auto"
    timeout_seconds: float = 30.0
    sees_gpus: bool = False


class Place(Value, frozen=True):
    """Of the ranks of a test over nodes those of this one: the first of them, of how many, and where all meet.

    By default all ranks are here, and meet at a port that is free.
    """

    first_rank: int = 0
    world_size: int | None = None
    master: str = "127.0.0.1"
    port: int | None = None


_HERE = Place()


class Course(Value, frozen=True):
    """What the ranks said, in the order in which it came, and how each ended: None where it was ended by us.

    `last_words` are the last line of each that was no event: of an interpreter or a library that complains.
    """

    events: tuple[Event, ...]
    exits: dict[int, int | None]
    last_words: dict[int, str]


def run(devices: Sequence[str], plan: Plan, say: Say, place: Place = _HERE) -> Course:
    """Run one rank for each device until all have ended, one has failed, or nobody says anything; `say` hears them.

    Raises OSError where the interpreter cannot be started.
    """
    lines: queue.Queue[tuple[int, str]] = queue.Queue(maxsize=1024)
    with _started(devices, plan, place) as ranks:
        readers = [
            threading.Thread(target=_read, args=(rank, stream, lines), daemon=True)
            for rank, process in ranks.items()
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        events, last_words = _listen(ranks, readers, lines, plan.timeout_seconds, say)
        exits = {rank: process.poll() for rank, process in ranks.items()}
    _drain(readers, lines)
    return Course(events=tuple(events), exits=exits, last_words=last_words)


def _listen(
    ranks: Mapping[int, subprocess.Popen[str]],
    readers: Sequence[threading.Thread],
    lines: queue.Queue[tuple[int, str]],
    timeout_seconds: float,
    say: Say,
) -> tuple[list[Event], dict[int, str]]:
    """What the ranks say, until nothing more is to be expected of them; and the last line of each that was no event."""
    events: list[Event] = []
    last_words: dict[int, str] = {}
    introduced: set[int] = set()
    explained: set[tuple[int, str]] = set()
    ends = time.monotonic() + START_SECONDS
    failed = False
    while time.monotonic() < ends and len(events) < _MOST_EVENTS:
        try:
            rank, line = lines.get(timeout=0.1)
        except queue.Empty:
            if not any(reader.is_alive() for reader in readers):
                break
        else:
            event = _event(rank, line)
            say(_words(rank, line) if event is None else _told(event))
            if event is None:
                last_words[rank] = line if line.strip() else last_words.get(rank, "")
                for told in _meaning(rank, line, explained):
                    say(told)
            else:
                events.append(event)
                introduced |= {event.rank} if event.event == "here" else set()
                failed = failed or event.event in ("timeout", "error")
            if not failed:
                patience = timeout_seconds if len(introduced) == len(ranks) else START_SECONDS
                ends = time.monotonic() + patience + _GRACE_SECONDS
        if failed or any(process.poll() not in (None, 0) for process in ranks.values()):
            ends = min(ends, time.monotonic() + _GRACE_SECONDS)
            failed = True
    return events, last_words


def _meaning(rank: int, line: str, explained: set[tuple[int, str]]) -> Iterator[str]:
    """What a line of NCCL means and what to do, once for each rank and kind; nothing of what it merely chose."""
    said = nccl_messages.find(line)
    row = None if said is None else nccl_messages.load()[said.name]
    if said is not None and row is not None and row.about != "setup" and (rank, said.name) not in explained:
        explained.add((rank, said.name))
        yield f"rank {rank}: that is: {row.meaning}; {row.remedy}"


@contextlib.contextmanager
def _started(devices: Sequence[str], plan: Plan, place: Place) -> Iterator[dict[int, subprocess.Popen[str]]]:
    ranks: dict[int, subprocess.Popen[str]] = {}
    meet = {
        "WORLD_SIZE": str(place.world_size or len(devices)),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port or free_port()),
    }
    try:
        for local_rank, device in enumerate(devices):
            rank = place.first_rank + local_rank
            seat = {"RANK": str(rank), "LOCAL_RANK": "0" if plan.sees_gpus else str(local_rank)}
            ranks[rank] = _start(device, plan, {**meet, **seat})
        yield ranks
    finally:
        for process in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: see _start
            process.wait()


def _start(device: str, plan: Plan, seat: Mapping[str, str]) -> subprocess.Popen[str]:
    place = {**seat, **({"CUDA_VISIBLE_DEVICES": device} if plan.sees_gpus else {})}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return subprocess.Popen(
        [
            plan.python,
            str(SCRIPT),
            "--events",
            f"--backend={plan.backend}",
            f"--timeout-seconds={plan.timeout_seconds:g}",
            f"--device={device}",
        ],
        env={**environment, "OMP_NUM_THREADS": "1", **place},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )


def free_port() -> int:
    """A TCP port at which nobody listened just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _read(rank: int, stream: IO[str], lines: queue.Queue[tuple[int, str]]) -> None:
    while line := stream.readline(_LINE_CHARACTERS):
        lines.put((rank, line.rstrip("\n")))


def _drain(readers: Sequence[threading.Thread], lines: queue.Queue[tuple[int, str]]) -> None:
    """Let the readers of ranks that have been ended come to an end."""
    ends = time.monotonic() + _GRACE_SECONDS
    while any(reader.is_alive() for reader in readers) and time.monotonic() < ends:
        with contextlib.suppress(queue.Empty):
            lines.get(timeout=0.05)


def _event(rank: int, line: str) -> Event | None:
    """The event of a line; None for what a library printed, and for what speaks of another rank."""
    try:
        event = decoding.json(line, Event)
    except (msgspec.DecodeError, ValueError):
        return None
    return event if event.rank == rank else None


def _words(rank: int, line: str) -> str:
    return f"[rank {rank}] {words.printable(line)}"


def _told(event: Event) -> str:
    """An event as a line for people; "" for those that are too many to be read."""
    match event.event:
        case "here":
            device = f"device {event.device} ({event.name})" if event.device else event.name
            at = f"{event.address or 'no address'} on {event.interface or 'an unknown interface'}"
            said = f"pid {event.pid}, {device}, {event.backend}, {at}"
        case "timeout":
            said = f"does not come out of {event.what}"
            said += f"; not come: {words.fold(event.missing)}" if event.missing else ""
        case "error":
            said = event.what
        case "wrong":
            said = f"{event.what} gave {event.found:g}, not {event.wanted:g}"
        case "done":
            said = "done"
        case _:
            return ""
    return _words(event.rank, f"{event.host}: {said}" if event.host else said)
