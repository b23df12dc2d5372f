"""Start of the ranks of a self-test on this node. It reads their output and ends them."""

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
from hangwatch.tables import nccl_messages
from hangwatch.tools.selftest.outcome import Event

SCRIPT = Path(__file__).with_name("rank.py")
START_SECONDS = 120.0
"""The longest time without output until each rank has introduced itself: torch is large, file systems are slow."""

_GRACE_SECONDS = 3.0
_LINE_CHARACTERS = 64 << 10
_MOST_EVENTS = 1 << 18

Say = Callable[[str], None]


class Plan(Value, frozen=True):
    """The options of the ranks. With `sees_gpus`, each rank sees only its own GPU (by CUDA_VISIBLE_DEVICES)."""

    python: str
    backend: str = "auto"
    timeout_seconds: float = 30.0
    sees_gpus: bool = False


class Course(Value, frozen=True):
    """The events of the ranks in the order of arrival, and the exit code of each rank; None if hangwatch killed it.

    `last_words` has each rank's last line that is not an event, such as an error of the interpreter or a library.
    """

    events: tuple[Event, ...]
    exits: dict[int, int | None]
    last_words: dict[int, str]


def run(devices: Sequence[str], plan: Plan, say: Say) -> Course:
    """Run one rank for each device until all ranks end, one fails, or none prints for too long.

    `say` is called with each line for the user. Raises OSError if the interpreter cannot be started.
    """
    lines: queue.Queue[tuple[int, str]] = queue.Queue(maxsize=1024)
    with _started(devices, plan) as ranks:
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
    # Discard lines until the threads that read the output of the ended ranks have finished.
    ends = time.monotonic() + _GRACE_SECONDS
    while any(reader.is_alive() for reader in readers) and time.monotonic() < ends:
        with contextlib.suppress(queue.Empty):
            lines.get(timeout=0.05)
    return Course(events=tuple(events), exits=exits, last_words=last_words)


def _listen(
    ranks: Mapping[int, subprocess.Popen[str]],
    readers: Sequence[threading.Thread],
    lines: queue.Queue[tuple[int, str]],
    timeout_seconds: float,
    say: Say,
) -> tuple[list[Event], dict[int, str]]:
    """Read the output of the ranks until they end or time out. Return their events, and their last other lines."""
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
            say(_prefixed(rank, line) if event is None else _describe(event))
            if event is None:
                last_words[rank] = line if line.strip() else last_words.get(rank, "")
                for meaning in _meaning(rank, line, explained):
                    say(meaning)
            else:
                events.append(event)
                introduced |= {event.rank} if event.event == "here" else set()
                failed = failed or event.event in ("timeout", "error")
            if not failed:
                silence_seconds = timeout_seconds if len(introduced) == len(ranks) else START_SECONDS
                ends = time.monotonic() + silence_seconds + _GRACE_SECONDS
        if failed or any(process.poll() not in (None, 0) for process in ranks.values()):
            ends = min(ends, time.monotonic() + _GRACE_SECONDS)
            failed = True
    return events, last_words


def _meaning(rank: int, line: str, explained: set[tuple[int, str]]) -> Iterator[str]:
    """Yield what a line of NCCL means and its remedy, once for each rank and kind; nothing for its setup."""
    message = nccl_messages.find(line)
    if message is None or (rank, message.name) in explained:
        return
    row = nccl_messages.load()[message.name]
    if row.about not in ("setup", "other"):
        explained.add((rank, message.name))
        yield f"rank {rank}: this means: {row.meaning}; {row.remedy}"


@contextlib.contextmanager
def _started(devices: Sequence[str], plan: Plan) -> Iterator[dict[int, subprocess.Popen[str]]]:
    ranks: dict[int, subprocess.Popen[str]] = {}
    rendezvous = {
        "WORLD_SIZE": str(len(devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    try:
        for rank, device in enumerate(devices):
            slot = {"RANK": str(rank), "LOCAL_RANK": "0" if plan.sees_gpus else str(rank)}
            ranks[rank] = _start(device, plan, {**rendezvous, **slot})
        yield ranks
    finally:
        for process in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads its own session, see _start
            process.wait()


def _start(device: str, plan: Plan, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    gpu = {"CUDA_VISIBLE_DEVICES": device} if plan.sees_gpus else {}
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
        env={**environment, "OMP_NUM_THREADS": "1", **variables, **gpu},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )


def _free_port() -> int:
    """Return a TCP port on which no process listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _read(rank: int, stream: IO[str], lines: queue.Queue[tuple[int, str]]) -> None:
    while line := stream.readline(_LINE_CHARACTERS):
        lines.put((rank, line.rstrip("\n")))


def _event(rank: int, line: str) -> Event | None:
    """Return the event in a line of a rank; None for output of a library, or for an event about another rank."""
    try:
        event = decoding.decode_json(line, Event)
    except (msgspec.DecodeError, ValueError):
        return None
    return event if event.rank == rank else None


def _prefixed(rank: int, line: str) -> str:
    return f"[rank {rank}] {words.printable(line)}"


def _describe(event: Event) -> str:
    """Return an event as a line for people; "" for events that are too frequent."""
    match event.event:
        case "here":
            device = f"device {event.device} ({event.name})" if event.device else event.name
            at = f"{event.address or 'no address'} on {event.interface or 'an unknown interface'}"
            text = f"pid {event.pid}, {device}, {event.backend}, {at}"
        case "timeout":
            text = f"{event.what} timed out"
            text += f"; not joined by ranks {words.fold(event.missing)}" if event.missing else ""
        case "error":
            text = event.what
        case "wrong":
            text = f"{event.what} returned {event.result:g}; expected {event.wanted:g}"
        case "done":
            text = "done"
        case _:
            return ""
    return _prefixed(event.rank, f"{event.host}: {text}" if event.host else text)
