"""Fuzz all parsers of foreign data: changed input gives a value or the documented error, in bounded time.

usage: python -m tests.fuzz_parsers [--count 1000000] [--seed 1] [--processes 2] [NAME...]

The inputs are shared out among the parsers by their cost. Each input is an intact one with some bytes, words or lines
changed, removed, repeated or taken from another input. A parser may raise only the errors that its docstring names,
and may take at most `MOST_SECONDS`; a parser that does not return is interrupted. The first bad input of each parser is printed, and the exit code is 1.
"""

import argparse
import itertools
import json
import os
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from hangwatch import config
from hangwatch.errors import UserError
from hangwatch.formats import incident_file, process_title, pyspy_json, sighting
from hangwatch.formats.pyspy_json import DumpError
from hangwatch.logs import failures, work_lines
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.gpu.messages import Answer, CallAnnouncement, DriverFailure, Hello, SweepMessage
from hangwatch.probes.network import infiniband, interfaces
from hangwatch.probes.node import chrony, kmsg, memory_pressure
from hangwatch.probes.process import live_environ, proc_pid
from hangwatch.probes.torch_recorder import libraries
from hangwatch.tables import kernel_lines, xids
from hangwatch.tools.explain import traces
from hangwatch.tools.explain.flight_dumps import recorder_dump, safe_pickle
from tests import samples
from tests.unit.test_flight_dump import dumped, entry

DATA = Path(__file__).parent / "data"
MOST_SECONDS = 2.0
INTERRUPT_SECONDS = 10.0
WORDS = (b"0", b"-1", b"18446744073709551616", b"1e999", b"NaN", b"\x00", b"\xff\xfe", "\u2028".encode(), b"\x1b[2J")
WORDS = (*WORDS, b'"', b"{", b"[" * 50, b"(deleted)", b" " * 300, b"9" * 4400, b"/" * 200, b"%", b"$(id)", b"null")
_WORD = re.compile(rb"[\w.-]+|[^\w\s]")


class EndlessError(BaseException):
    """A parser did not return. No parser catches it."""


class Parser(NamedTuple):
    """A parser: its function of bytes, the errors that it may raise, and intact inputs."""

    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


def _of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda raw: parse(raw.decode("utf-8", "surrogateescape"))


def _files(*patterns: str) -> list[bytes]:
    return [path.read_bytes()[:20_000] for pattern in patterns for path in sorted(DATA.glob(pattern)) if path.is_file()]


def _proc(*names: str) -> list[bytes]:
    return [Path("/proc/self", name).read_bytes() for name in names]


def _parse_record(text: str) -> object:
    record = kmsg.parse_record(text)
    return None if record is None else kernel_lines.find(record.text)


def _collect(raw: bytes) -> object:
    return traces.collect([("rank0.txt", raw.decode("utf-8", "replace").splitlines())])


_MESSAGE = msgspec.json.Decoder(Hello | CallAnnouncement | SweepMessage | DriverFailure | Answer)
_FRAME = {"name": "f", "filename": "/a/train.py", "short_filename": "train.py", "line": 3, "locals": None}
_PYSPY = [{"pid": 7, "thread_id": 1, "thread_name": "MainThread", "active": True, "owns_gil": True, "frames": [_FRAME]}]
_RECORDER = dumped(entry(0), entry(1), entry(2, state="started", retired=False))
_KMSG = b"4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus."
_JOURNAL = b"12,1,2,-;Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB, file-rss:3kB, uid:0"

# whole: else no changed one decodes
_INCIDENTS = [incident_file.encode(sample()) for sample in samples.SAMPLES.values()]

PARSERS: dict[str, Parser] = {
    "py-spy": Parser(lambda raw: pyspy_json.parse_json(raw, 7), (DumpError,), [json.dumps(_PYSPY).encode()]),
    "stacks and logs": Parser(_collect, (UserError,), _files("explain/*.txt", "explain/*/*/*/*/*.log")),
    "recorder dump": Parser(
        recorder_dump.parse, (ValueError,), [json.dumps(_RECORDER).encode(), pickle.dumps(_RECORDER, 2)]
    ),
    "pickle": Parser(safe_pickle.load_plain_values, (ValueError,), [pickle.dumps(_RECORDER, n) for n in range(2, 6)]),
    "process title": Parser(_of_text(process_title.read), (), [b"ray::WorkerDict.generate", b"VLLM::Worker_TP1"]),
    "incident": Parser(lambda raw: incident_file.parse(Path("incident.json"), raw), (UserError,), _INCIDENTS),
    "grouped dump": Parser(lambda raw: sighting.parse(Path("incident.json"), raw), (UserError,), _INCIDENTS),
    "configuration": Parser(
        _of_text(lambda text: config.parse(text, "hangwatch.toml")), (UserError,), [config.sample().encode()]
    ),
    "error.json": Parser(_of_text(failures.parse_error_file), (ValueError,), _files("explain/failed/*/*/*/error.json")),
    "work lines": Parser(_of_text(work_lines.parse), (), [b"WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=4)"]),
    "kernel record": Parser(_of_text(_parse_record), (), [_KMSG, _JOURNAL]),
    "XID": Parser(_of_text(xids.read_code), (), [_KMSG]),
    "kernel lines": Parser(_of_text(kernel_lines.find), (), [_KMSG, _JOURNAL]),
    "driver process": Parser(
        _MESSAGE.decode,
        (msgspec.DecodeError, UnicodeDecodeError),
        [msgspec.json.encode(Hello()), msgspec.json.encode(CallAnnouncement(gpu=1))],
    ),
    "memory pressure": Parser(
        _of_text(lambda text: memory_pressure.parse(text, text)),
        (),
        [Path("/proc/meminfo").read_bytes(), b"some avg10=0.00 avg60=0.00 avg300=0.00 total=0"],
    ),
    "chronyc": Parser(
        _of_text(chrony.parse_tracking),
        (),
        [b"A9FEA97B,169.254.169.123,4,1.2,0.000000012,0.1,0.2,-1.5,0.001,0.02,0.0003,0.0004,16.1,Normal"],
    ),
    "mounts": Parser(_of_text(filesystems.parse_mounts), (), _proc("mountinfo")),
    "maps": Parser(libraries.parse_maps, (), _proc("maps")),
    "modules": Parser(lambda raw: live_environ.parse_maps(raw, b"/usr/bin/python3"), (), _proc("maps")),
    "limits": Parser(_of_text(lambda text: proc_pid.parse_file_limit(text, "pid 7")), (), _proc("limits")),
    "io": Parser(_of_text(lambda text: procfs.parse_io(text, "rchar", "wchar")), (), _proc("io")),
    "net/dev": Parser(_of_text(interfaces.parse_dev), (), _proc("net/dev")),
    "net/route": Parser(_of_text(interfaces.parse_routes), (), _proc("net/route")),
    "InfiniBand rate": Parser(_of_text(infiniband.parse_rate), (), [b"400 Gb/sec (4X NDR)"]),
}
"""All parsers of data that hangwatch did not write, by name."""


def change(raw: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """Return a changed copy of an input."""
    data = bytearray(raw)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(8):
            case 0 if data:
                data[at - 1] ^= 1 << dice.randrange(8)
            case 1:
                data[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 2:
                del data[at : at + dice.randrange(1, 40)]
            case 3:
                del data[at:]
            case 4 if words := list(itertools.islice(_WORD.finditer(bytes(data), at), 4)):
                word = dice.choice(words)
                data[slice(*word.span())] = dice.choice(WORDS)
            case 5:
                part = bytes(data[at : at + dice.randrange(1, 400)])
                data[at:at] = part * dice.choice((1, 2, 40))
            case 6:
                other = dice.choice(others)
                data[at:] = other[dice.randrange(len(other) + 1) :]
            case _:
                lines = bytes(data).split(b"\n")
                dice.shuffle(lines)
                data = bytearray(b"\n".join(lines))
    return bytes(data[:200_000])


def fuzz(name: str, count: int, seed: int) -> tuple[int, str | None]:
    """Try `count` inputs. Return the number of inputs that were refused, and the first bad result as text."""
    parser, dice, refused = PARSERS[name], random.Random(f"{seed} {name}"), 0
    signal.signal(signal.SIGVTALRM, _interrupt)
    for number in range(count):
        raw = dice.choice(parser.seeds)
        given = raw if number == 0 else change(raw, parser.seeds, dice)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, INTERRUPT_SECONDS)
        try:
            parser.parse(given)
        except parser.errors:
            refused += 1
        except (Exception, EndlessError) as error:
            return refused, f"{name}: {type(error).__name__}: {error}: {given[:2000]!r}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if (seconds := time.process_time() - began) > MOST_SECONDS:
            return refused, f"{name}: {seconds:.1f} s of CPU for {len(given)} bytes: {given[:2000]!r}"
    return refused, None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise EndlessError(f"no return after {INTERRUPT_SECONDS:g} s of CPU")


def share_out(count: int, names: Sequence[str]) -> dict[str, int]:
    """Return the number of inputs of each parser. A parser gets fewer inputs if each takes longer."""
    speeds = {}
    for name in names:
        began = time.perf_counter()
        fuzz(name, 50, 0)
        speeds[name] = (time.perf_counter() - began) ** -0.5
    return {name: int(count * speed / sum(speeds.values())) + 1 for name, speed in speeds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *PARSERS])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    shares = share_out(options.count, options.names or list(PARSERS))
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(pool.map(fuzz, shares, shares.values(), [options.seed] * len(shares)))
    for (name, count), (refused, bad) in zip(shares.items(), found, strict=True):
        print(bad or f"{name}: {count:,} inputs, {refused:,} refused")
    bad = sum(text is not None for _, text in found)
    print(f"{sum(shares.values()):,} inputs, {len(shares)} parsers, {bad} with a bad result")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
