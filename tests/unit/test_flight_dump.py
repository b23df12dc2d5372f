"""Dumps of flight recorders of every torch version, and other files: a pickle could run a program."""

import copy
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch import config
from hangwatch.model import Confidence, Fault, Group, Grouping, Member, RankId, Verdict
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import file_names
from hangwatch.tools.explain.flight_dumps import rank_recorders, recorder_dump, safe_pickle
from hangwatch.tools.explain.flight_dumps.rank_recorders import DumpFile
from hangwatch.verdict import judge, recorder_dumps
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import build_scene
from hangwatch.verdict.sequence_rules import Answer, decide_by_records
from hangwatch.verdict.wording import sequence_numbers
from tests.commands import finished

NOW = 1_795_338_512.0
CREATED_NS = 1_795_338_000 * 10**9


def entry(number: int, **given: object) -> dict[str, object]:
    """Return the record of an NCCL operation, as in dumps of format 2.3 (torch 2.5)."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": CREATED_NS + number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": CREATED_NS + number + 5,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **given,
    }


def dumped(*entries: Mapping[str, object], **given: object) -> dict[str, object]:
    return {
        "version": "2.3",
        "entries": list(entries),
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
        "pg_status": {
            "0": {"last_enqueued_collective": 3, "last_started_collective": 2, "last_completed_collective": 2}
        },
        **given,
    }


def as_pickle(value: object, protocol: int = 2) -> bytes:
    return pickle.dumps(value, protocol)


def parse(value: object) -> recorder_dump.FlightDump:
    return recorder_dump.parse(as_pickle(value))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_and_the_same_as_json_are_read_alike(protocol: int) -> None:
    value = dumped(entry(0), entry(1), entry(2, state="started", retired=False, time_discovered_completed_ns=None))
    found = recorder_dump.parse(as_pickle(value, protocol))
    (recorder,) = found.recorders
    assert [record.is_open for record in recorder.records] == [False, False, True]
    assert [record.completed_unix_ns for record in recorder.records] == [CREATED_NS + 5, CREATED_NS + 6, 0]
    assert (recorder.library, recorder.next_id, recorder.oldest_id, recorder.is_wrapped) == ("nccl", 3, 0, False)
    assert (found.world_size, found.possible_ranks) == (4, ((0, 3, 1),))
    texts = {key: str(number) for key, number in value["pg_status"]["0"].items()}  # type: ignore[index]
    told = json.dumps({**value, "pg_status": {"0": texts}}).replace("null", "0")
    assert recorder_dump.parse(told.encode()) == found


LIBRARIES = {
    "gloo retired it": ({"profiling_name": "gloo:all_reduce", "state": "scheduled", "retired": True}, False),
    "gloo has it open": ({"profiling_name": "gloo:all_reduce", "state": "scheduled", "retired": False}, True),
    "nccl2 retired it": ({"profiling_name": "nccl2:all_reduce", "state": "scheduled", "retired": True}, False),
    "xccl has it open": ({"profiling_name": "xccl:all_reduce", "state": "scheduled", "retired": False}, True),
    "NCCL retired it at its time-out": ({"state": "started", "retired": True}, True),
    "completed, not yet retired": ({"state": "completed", "retired": False}, False),
    "NCCL ended it by an abort": ({"time_discovered_completed_ns": CREATED_NS + 601 * 10**9}, True),
}


@pytest.mark.parametrize(("given", "counts"), LIBRARIES.values(), ids=LIBRARIES)
def test_what_is_open_is_told_by_each_library_in_its_own_way(given: dict[str, object], counts: bool) -> None:
    assert parse(dumped(entry(0, **given))).recorders[0].records[0].counts_as_open == counts


def test_late_operation_has_completed_if_its_group_went_on() -> None:
    """Without error handling no watchdog aborts it, for example behind a checkpoint of one rank."""
    ended_ns = CREATED_NS + 601 * 10**9
    late, later = entry(0, time_discovered_completed_ns=ended_ns), entry(1, time_created_ns=ended_ns + 5)
    later["time_discovered_completed_ns"] = ended_ns + 9
    assert [one.is_open for one in parse(dumped(late, later)).recorders[0].records] == [False, False]


def test_a_batch_is_open_where_the_record_that_closes_it_is() -> None:
    batch = {"state": "scheduled", "retired": False, "is_p2p": True, "p2p_seq_id": 1}
    part = entry(0, profiling_name="nccl:send 1->2", **batch)
    closing = entry(1, profiling_name="nccl:coalesced", **batch)
    records = parse(dumped(part, closing)).recorders[0].records
    assert [one.operation for one in records if one.counts_as_open] == ["nccl:coalesced"]


def test_batch_that_is_counted_as_a_collective_is_none() -> None:
    """Torch 2.4 counts so: the collectives of its group have different numbers on ranks that are in step."""
    part = entry(0, profiling_name="nccl:send 1->2", is_p2p=True, state="scheduled", retired=False)
    number = part["collective_seq_id"]
    closing = entry(1, profiling_name="nccl:coalesced", collective_seq_id=number, state="started", retired=False)
    (recorder,) = parse(dumped(part, closing, entry(2, collective_seq_id=number + 1))).recorders
    assert [(one.id, one.is_p2p, one.p2p_seq, one.counts_as_open) for one in recorder.records] == [
        (0, True, number, False),
        (1, True, number, True),
    ]


def test_operations_of_torch_2_2_and_2_3_are_read_if_they_are_of_all_ranks() -> None:
    row = {key: entry(1)[key] for key in ("pg_id", "profiling_name", "input_sizes", "output_sizes", "state", "retired")}
    old = row | {"seq_id": 7, "time_created_us": CREATED_NS // 1000}
    newer = row | {"seq_id": 7, "time_created_ns": CREATED_NS}
    for whole, first in (
        ([old, old], 0),
        ({"version": "1.4", "entries": [newer | {"record_id": 5}, newer | {"record_id": 6}]}, 5),
    ):
        assert recorder_dump.begins_so(as_pickle(whole))
        (recorder,) = parse(whole).recorders
        assert [(record.id, record.collective_seq) for record in recorder.records] == [(first, 7), (first + 1, 7)]
    with pytest.raises(ValueError, match=r"torch 2\.2"):
        parse([old | {"pg_id": 1}])


def test_before_2_1_a_record_does_not_say_that_it_is_point_to_point() -> None:
    old = {key: value for key, value in entry(0, profiling_name="nccl:recv 1<-0").items() if key != "is_p2p"}
    assert parse(dumped(old)).recorders[0].records[0].is_p2p


@pytest.mark.parametrize(
    ("entries", "oldest_id", "is_wrapped"),
    [
        ((entry(0), entry(1)), 0, False),
        ((entry(70), entry(71)), 70, True),
        ((entry(0, collective_seq_id=9), entry(1, collective_seq_id=10)), 0, True),
        ((entry(0, state="scheduled"), entry(7, state="scheduled")), 8, True),
        ((entry(0), entry(3), entry(4)), 3, True),
    ],
    ids=["whole", "wrapped", "reset", "only what is open", "with a gap"],
)
def test_how_far_back_it_is_whole(entries: tuple[dict[str, object], ...], oldest_id: int, is_wrapped: bool) -> None:
    (recorder,) = parse(dumped(*entries)).recorders
    assert (recorder.oldest_id, recorder.is_wrapped) == (oldest_id, is_wrapped)


def test_a_send_tells_the_rank_by_its_place_in_the_group() -> None:
    group = {"1": {"name": "1", "desc": "pp", "ranks": "[2, 6]"}}
    send = entry(0, profiling_name="nccl:send 1->0", is_p2p=True, process_group=("1", "pp"), pg_id=1)
    assert parse(dumped(send, pg_config=group)).possible_ranks == ((6, 6, 1),)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.5"},
        {"version": None},
        {"entries": {"0": 1}},
        {"entries": [[1]]},
        {"pg_status": {"0": {"last_enqueued_collective": "-5"}}},
        {"pg_config": {"0": {"ranks": "[__import__('os')]"}}},
        {"pg_config": {"0": {"ranks": "[99999999]"}}},
        {"entries": [entry(1), entry(1)]},
        {"entries": [entry(0, record_id=True)]},
        {"entries": [entry(0, record_id=-1)]},
        {"entries": [entry(0, collective_seq_id="many")]},
        {"entries": [entry(0, time_created_ns=5)]},
        {"entries": [entry(0, process_group=("0",) * 2, profiling_name="all_reduce")]},
        {"entries": [entry(number, profiling_name=f"backend{number}:all_reduce") for number in range(17)]},
        {"entries": [entry(0, state="lost")]},
        {"entries": [entry(0, retired=1)]},
        {"entries": [entry(0, input_sizes=[["x"]])]},
        {"entries": [entry(0, input_sizes=4)]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_dump_is_refused_with_a_reason(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^(is|has|lists) "):
        parse(dumped(entry(0)) | change)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.sampled_from([*entry(0), "frames", "thread_id", "thread_name"]), ANY, st.booleans())
def test_any_value_in_any_place_is_read_or_refused(key: str, value: object, is_json: bool) -> None:
    whole = dumped(entry(0, **{key: value}))
    content = json.dumps(whole).encode() if is_json else as_pickle(whole)
    try:
        found = recorder_dump.parse(content)
    except ValueError as error:
        assert str(error)
    else:
        assert all(record.group_name.isprintable() for one in found.recorders for record in one.records)


@given(st.binary(max_size=64), st.integers(0, 400))
def test_a_torn_or_changed_dump_is_read_or_refused(noise: bytes, at: int) -> None:
    whole = as_pickle(dumped(entry(0), entry(1)))
    for content in (whole[:at], whole[:at] + noise, whole[:at] + noise + whole[at + len(noise) :], noise):
        try:
            recorder_dump.parse(content)
        except ValueError as error:
            assert str(error).startswith(("is ", "has ", "holds ", "may ")) and str(error).isprintable()


class _Calls:
    """A value with a hostile pickle: unpickling it calls os.system."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {TOUCHED}",)


TOUCHED = Path("/nowhere")


@pytest.fixture
def touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "touched"
    monkeypatch.setitem(globals(), "TOUCHED", path)
    return path


def programs(path: Path) -> dict[str, bytes]:
    """Return hostile pickles by name. Unpickling any of them would run a program that creates `path`."""
    run = f"X{{}}touch {path}".encode()
    text = b"X" + struct.pack("<I", len(run) - 3) + run[3:]
    short = b"\x8c\x02os\x8c\x06system"
    return {
        **{f"REDUCE {protocol}": as_pickle(_Calls(), protocol) for protocol in range(6)},
        "GLOBAL": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04" + short + b"\x93" + text + b"\x85R.",
        "INST": b"\x80\x02(" + text + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "BUILD": b"\x80\x02cos\nsystem\n)\x81}" + text + b"Nsb.",
        "NEWOBJ_EX": b"\x80\x04" + short + b"\x93" + text + b"\x85}\x92.",
        "EXT1": b"\x80\x02\x82\x01" + text + b"\x85R.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
        **{f"only {code!r}": b"\x80\x02N" + code + b"." for code in (b"R", b"o", b"b", b"\x81", b"\x93")},
        "PERSID": b"\x80\x02Pos.system\n.",
        "BINPERSID": b"\x80\x02" + text + b"Q.",
        "in a dump": as_pickle(dumped(entry(0), comm_lib_version=_Calls())),
        "after a dump": as_pickle(dumped(entry(0)))[:-1] + b"0cos\nsystem\n" + text + b"\x85R.",
        "behind a frame": b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00}." + b"cos\nsystem\n" + text + b"\x85R.",
    }


def test_they_would_run(touched: Path) -> None:
    # Python's own unpickler runs the code in these pickles. Otherwise the other tests would prove nothing.
    for name in ("REDUCE 2", "GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "in a dump", "after a dump"):
        pickle.loads(programs(touched)[name])
        assert touched.exists(), name
        touched.unlink()


def test_no_pickle_runs_anything(touched: Path) -> None:
    for name, content in programs(touched).items():
        with pytest.raises(
            ValueError, match=r"may do more than contain values|is not a flight recorder dump|is not (a )?complete"
        ) as refused:
            recorder_dump.parse(content)
        assert not touched.exists(), name
        is_pickle = name not in ("REDUCE 0", "REDUCE 1", "behind a frame")  # these two do not begin as a pickle
        assert not is_pickle or "may do more than contain values: opcode" in str(refused.value), name


@given(ANY, st.integers(2, 5))
def test_plain_values_are_read_as_python_reads_them(value: object, protocol: int) -> None:
    values = [value, {("0", "pg"): value}]
    assert repr(safe_pickle.load_plain_values(as_pickle(values, protocol))) == repr(values)


MEBIBYTE = 1 << 20
BOMBS: dict[str, Callable[[], bytes]] = {
    "memo growth": lambda: b"\x80\x02}r\xff\xff\xff\x7f.",
    "LONG4": lambda: b"\x80\x02\x8b\xff\xff\xff\x7f" + bytes(MEBIBYTE) + b".",
    "LONG of digits": lambda: b"\x80\x02L" + b"9" * (8 * MEBIBYTE) + b"L\n.",
    "LONG1 of 255 bytes": lambda: b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "BINUNICODE8": lambda: b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "BINUNICODE": lambda: b"\x80\x02X\xff\xff\xff\xff.",
    "BINBYTES8": lambda: b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "BYTEARRAY8": lambda: b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "FRAME": lambda: b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    "dicts": lambda: b"\x80\x02" + b"}" * (64 * MEBIBYTE - 3) + b".",
    "dicts in a list": lambda: b"\x80\x02](" + b"}" * 3_999_990 + b"e.",
    "deep lists": lambda: b"\x80\x02" + b"]" * 1_500_000 + b"a" * 1_499_999 + b".",
    "marks": lambda: b"\x80\x02" + b"(" * 3_999_990 + b".",
    "deep tuples": lambda: b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    "deep tuples as a key": lambda: b"\x80\x02}N" + b"NN\x86" + b"N\x86" * 1_000_000 + b"Ns.",
    "deep pairs of texts": lambda: b"\x80\x02}" + b"\x8c\x01a" + b"\x8c\x01a\x86" * 1_000_000 + b"Ns.",
    "a memoized pair as a text": lambda: (
        b"\x80\x02}" + b"\x8c\x01a\x8c\x01a\x86q\x00" + b"h\x00h\x00\x86q\x00" * 10 + b"Ns."
    ),
    "doubled lists": lambda: b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(200)) + b".",
    "larger than 64 MiB": lambda: b"\x80\x02" + bytes(64 * MEBIBYTE),
}

IN_A_CHILD = """
import pathlib, re, resource, sys, time
from hangwatch.tools.explain.flight_dumps import recorder_dump as flight_dump
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
content = open(sys.argv[1], "rb").read()
try:
    found = flight_dump.parse(content)
    print(sum(len(one.records) for one in found.recorders), "operations, last in", found.last.frame)
except ValueError as error:
    print(error)
print(int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text()).group(1)) >> 10, time.process_time())
"""


def parse_within(most_mebibytes: int, content: bytes, folder: Path) -> str:
    """Parse `content` in a child process, which must keep these bounds. Return what it printed."""
    path = folder / "bomb"
    path.write_bytes(content)
    done = finished(sys.executable, "-c", IN_A_CHILD, path)
    assert done.returncode == 0, done.stderr[-500:]
    why, used = done.stdout.strip().rsplit("\n", 1)
    mebibytes, seconds = map(float, used.split())
    print(f"{why}; {mebibytes:.0f} MiB, {seconds:.1f} s of CPU")
    assert mebibytes < most_mebibytes
    assert seconds < 20
    return why


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_is_refused_within_bounds(name: str, tmp_path: Path) -> None:
    assert parse_within(700, BOMBS[name](), tmp_path).startswith(("is ", "has ", "holds ", "may "))


@pytest.mark.parametrize("text", ["[" * 1_000_000, "[[]," * 3_000_000, '{"a":' * 500_000, "0," * 8_000_000])
def test_json_that_grows_or_nests_is_refused_within_bounds(text: str, tmp_path: Path) -> None:
    why = parse_within(400, b'{"pg_config":' + text.encode(), tmp_path)
    assert why.startswith(("is not complete JSON", "holds more values"))


STEP = {"name": "step", "filename": "/srv/job/train.py", "line": 7}
LARGEST: dict[str, Callable[[], dict[str, object]]] = {
    "60000 operations, last in None": lambda: dumped(*map(entry, range(60_000))),
    "20000 operations, last in step (train.py:7)": lambda: dumped(
        *(entry(number, frames=[STEP] * 60) for number in range(20_000))
    ),
    "16 operations, last in None": lambda: dumped(
        *(entry(number, profiling_name=f"backend{number}:all_reduce") for number in range(16)),
        pg_status={str(number): {} for number in range(300_000)},
        pg_config={str(number): {"ranks": "[]"} for number in range(300_000)},
    ),
    "2 operations, last in None": lambda: dumped(
        entry(0),
        entry(1, frames=[{"filename": "/b" * 15 * MEBIBYTE}] * 900_000),
        pg_config={"0": {"ranks": str([*range(1_800_000)])}},
    ),
}


@pytest.mark.parametrize("answer", LARGEST)
def test_dump_as_large_as_the_limits_is_read_within_bounds(answer: str, tmp_path: Path) -> None:
    assert parse_within(700, as_pickle(LARGEST[answer](), 4), tmp_path) == answer


def test_one_value_at_many_places_is_not_counted_out(tmp_path: Path) -> None:
    """Refuse a small pickle of 10^10 numbers: a list of 100,000 is at many places in it."""
    numbers = [7] * 100_000
    sizes = [numbers] * 100_000
    one = entry(0, input_sizes=sizes, frames=sizes)
    ranks = "[" + ", ".join(map(str, range(100_000))) + "]"
    groups = {str(number): {"name": str(number), "desc": "", "ranks": ranks} for number in range(4000)}
    for value in (dumped(*[one] * 100_000), dumped(one, pg_config=groups)):
        why = parse_within(700, as_pickle(value), tmp_path)
        assert why.startswith(("has entries that are not in the order", "has a list of ranks"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["nccl_trace_rank_3"], {"nccl_trace_rank_3": (3, True)}),
        (["a/fr_0", "a/fr_1"], {"a/fr_0": (0, True), "a/fr_1": (1, True)}),
        (["fr_8", "fr_9"], {"fr_8": (8, False), "fr_9": (9, False)}),
        (["fr_4711", "fr_0"], {"fr_4711": (4711, False), "fr_0": (0, False)}),
        (["trace"], {}),
        (["dump-20261122.pkl"], {}),
        (["trace_0.json", "trace_1.json"], {"trace_0.json": (0, True), "trace_1.json": (1, True)}),
    ],
)
def test_rank_of_dump_is_number_at_end_of_its_name(given: list[str], expected: Mapping[str, tuple[int, bool]]) -> None:
    assert file_names.dump_ranks(given) == expected


def files(**by_name: object) -> list[DumpFile]:
    """Return dumps by file name."""
    return [
        DumpFile(name, parse(value if isinstance(value, dict) else dumped(entry(0)))) for name, value in by_name.items()
    ]


def test_a_name_that_the_groups_contradict_is_left_out() -> None:
    joined = rank_recorders.join(files(fr_rank_2=None, fr_rank_9=None, trace_3=None, trace=None))
    assert sorted(joined.by_rank) == [2, 3]
    assert [note for note in joined.notes if "fr_rank_9" in note and "ignored" in note]
    assert [note for note in joined.notes if note.startswith("trace: 1 dump") and "rank is unknown" in note]


def test_dump_on_standard_input_is_recognised() -> None:
    command = [sys.executable, "-m", "hangwatch", "explain", "-"]
    done = subprocess.run(command, input=as_pickle(dumped(entry(0))), capture_output=True, timeout=60)
    assert done.returncode == 2 and b"-: 1 dump of a flight recorder: the rank is unknown" in done.stderr


def test_of_two_dumps_of_a_rank_the_later_counts() -> None:
    later = dumped(entry(0), entry(1, time_created_ns=CREATED_NS + 10**9))
    joined = rank_recorders.join(files(old_rank_0=None, new_rank_0=later))
    assert joined.by_rank[0][0].next_id == 2
    assert [note for note in joined.notes if note.endswith("used: new_rank_0")]


@pytest.mark.parametrize(
    ("name", "ranks"), [("node{}-gpu{}", [0, 1, 2, 3]), ("node{}/rank{}", [0, 1, 2, 3]), ("gpu-{}/fr_{}", [])]
)
def test_numbers_that_repeat_on_each_node_are_local_ranks(name: str, ranks: list[int]) -> None:
    config_of_group = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    hosts = "ab" if name.startswith("gpu") else (1, 2)
    names = [name.format(host, gpu) for host in hosts for gpu in (0, 1)]
    joined = rank_recorders.join(files(**dict.fromkeys(names, dumped(entry(0), pg_config=config_of_group))))
    assert list(joined.by_rank) == ranks


def test_several_dumps_of_many_ranks_are_one_note() -> None:
    joined = rank_recorders.join(files(**{f"{run}_rank_{rank}": None for run in ("old", "new") for rank in range(4)}))
    (note,) = (note for note in joined.notes if "several dumps" in note)
    assert note.startswith("ranks 0-3 have several dumps")


@pytest.mark.parametrize(
    ("hours", "number", "world", "ranks"),
    [
        (0.9, 9, range(4), [0, 1, 2]),
        (1.1, 9, range(4), [1, 2]),
        (0.9, 9, range(3), [1, 2]),
        (0.9, 1, range(4), [1, 2]),  # rank 0 completed this number long before rank 1 began it
        (0.01, 1, range(4), [0, 1, 2]),
    ],
)
def test_dump_of_earlier_run_is_ignored_by_its_times_or_its_ranks(
    hours: float, number: int, world: range, ranks: list[int]
) -> None:
    config_of_group = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*world])}}
    record = entry(0, collective_seq_id=number, time_created_ns=CREATED_NS + int(hours * 3600 * 10**9))
    later = dumped(record, pg_config=config_of_group)
    joined = rank_recorders.join(files(fr_rank_0=None, fr_rank_1=later, fr_rank_2=dumped(pg_config=config_of_group)))
    assert sorted(joined.by_rank) == ranks
    assert [note.startswith("flight recorder of rank 0") for note in joined.notes] == [True] * (3 - len(ranks))


TABLE = activity.load()
GROUPS = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [0, 1]), "2": ("tp", [2, 3])}
Program = list[tuple[str, str]]
"""Operations of a rank in order, each with the name of its group."""


def recorder(rank: int, program: Program, first_open: int) -> dict[str, Any]:
    """Return the NCCL dump of one rank. Operations from number `first_open` on are open."""
    numbers: dict[str, int] = {}
    entries = []
    for place, (group, operation) in enumerate(program):
        numbers[group] = numbers.get(group, 0) + 1
        is_open = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
        entries.append(
            entry(
                place,
                pg_id=int(group),
                process_group=(group, GROUPS[group][0]),
                collective_seq_id=numbers[group],
                profiling_name=f"nccl:{operation}",
                time_created_ns=CREATED_NS + place * 10**6,
                **(is_open if place >= first_open else {}),
            )
        )
    mine = {name: (desc, ranks) for name, (desc, ranks) in GROUPS.items() if rank in ranks}
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in mine.items()},
        "pg_status": {},
    }


def judged(dumps: Mapping[int, dict[str, Any]]) -> tuple[Answer, Verdict]:
    joined = rank_recorders.join([DumpFile(f"rank{rank}", parse(dump)) for rank, dump in dumps.items()])
    ranks = recorder_dumps.without_stacks(joined.by_rank, [], joined.world_size)
    grouping = group_ranks(ranks, TABLE, config.Capture(), joined.world_size)
    grouping = recorder_dumps.with_records(grouping, joined.by_rank)
    verdict = judge.judge(grouping, dumped_records=joined.by_rank)
    return decide_by_records(grouping), verdict


def referee(dumps: Mapping[int, dict[str, Any]]) -> dict[tuple[str, int], tuple[set[int], set[int]]]:
    """Return (missing ranks, ranks in another operation) by (group, number), from torch's own analyzer."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    configured = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager").JobConfig()
    details = {
        str(rank): {"rank": rank, "host_name": f"host_rank{rank}", **copy.deepcopy(dump)}
        for rank, dump in dumps.items()
    }
    database = builder.build_db(details, configured.parse_args([]), "2.10")
    return {
        (one.group_id, one.collective_seq_id): (set(one.missing_ranks or ()), set(one.mismatch_collectives or ()))
        for one in database.collectives
        if one.missing_ranks or one.mismatch_collectives
    }


WORLD = ("0", "all_reduce")
OWN = {0: ("1", "all_reduce"), 1: ("1", "all_reduce"), 2: ("2", "all_reduce"), 3: ("2", "all_reduce")}


@pytest.mark.torch
def test_torch_finds_the_same_rank_missing() -> None:
    # Rank 2 is in its own code. All other ranks have enqueued one more collective.
    dumps = {rank: recorder(rank, [WORLD] * (4 if rank == 2 else 5), 4) for rank in range(4)}
    answer, verdict = judged(dumps)
    assert referee(dumps) == {("0", 5): ({2}, set())}
    assert [(one.name, one.number, one.missing) for one in answer.graph.pending] == [("0", 5, (2,))]
    assert [one.rank for one in verdict.check_first] == [2]


@pytest.mark.torch
def test_torch_finds_the_same_skipped_collectives() -> None:
    # Rank 2 skips the third all_reduce of the default group and continues in group tp, where rank 3 does not join.
    dumps = {}
    for rank in range(4):
        program = [WORLD, OWN[rank], WORLD, OWN[rank], OWN[rank] if rank == 2 else WORLD]
        dumps[rank] = recorder(rank, program, 4)
    answer, verdict = judged(dumps)
    ours = {(one.name, one.number): (set(one.missing), set[int]()) for one in answer.graph.pending}
    assert referee(dumps) == ours == {("0", 3): ({2}, set()), ("2", 3): ({3}, set())}
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("Cycle", [2])


@pytest.mark.torch
def test_torch_finds_the_same_mismatch() -> None:
    other = ("0", "broadcast")
    dumps = {rank: recorder(rank, [WORLD, WORLD, other if rank == 1 else WORLD], 2) for rank in range(4)}
    answer, verdict = judged(dumps)
    assert referee(dumps) == {("0", 3): (set(), {1})}
    assert (verdict.kind, answer.check_first) == ("Mismatch", (1,))
    assert answer.graph.mismatches == ((("all_reduce", (0, 2, 3)), ("broadcast", (1,))),)


def test_rank_without_an_open_operation_is_checked_with_one_without_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 wait for rank 1. It has no dump and may itself wait for rank 3, which is in its own code."""
    monkeypatch.setitem(GROUPS, "1", ("tp", [0, 1, 2]))
    dumps = {rank: recorder(rank, [WORLD, OWN[0], WORLD], 1) for rank in (0, 2)} | {3: recorder(3, [WORLD], 1)}
    assert [one.rank for one in judged(dumps)[1].check_first] == [1, 3]


def test_mismatch_is_shown_with_the_operation_of_its_group() -> None:
    """Ranks 0 and 1 wait in another operation of the default group, too, which comes first in the list."""
    other = ("2", "broadcast")
    dumps = {rank: recorder(rank, [WORLD, WORLD] if rank < 2 else [WORLD, OWN[2]], 1) for rank in range(3)}
    dumps[3] = recorder(3, [WORLD, other], 1)
    _, verdict = judged(dumps)
    assert verdict.kind == "Mismatch"
    assert "(all_reduce #1 of tp of ranks 2-3)" in verdict.message


def test_a_wrong_size_in_each_of_two_groups_is_shown_with_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in (("1", [0, 1, 2]), ("2", [3, 4, 5])):
        monkeypatch.setitem(GROUPS, name, ("tp", members))
    dumps = {rank: recorder(rank, [("1" if rank < 3 else "2", "all_reduce")], 0) for rank in range(6)}
    for rank in (1, 4):
        dumps[rank]["entries"][-1]["input_sizes"] = [[3]]
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("Mismatch", [1, 4])
    assert "all_reduce #1 of tp of ranks 3-5" in verdict.message


@pytest.mark.parametrize(("counted", "checked"), [(4, [2]), (5, []), (3, []), (None, [])])
def test_rank_inside_a_launch_has_not_joined_the_collective(counted: int | None, checked: list[int]) -> None:
    """torch counts a collective after its launch. A count that is much lower is not kept: of a CUDA graph."""
    dumps = {one: recorder(one, [WORLD] * (5 if one == 2 else 8), 4) for one in range(4)}
    if counted is not None:
        status = {"last_enqueued_collective": counted, "last_started_collective": 4, "last_completed_collective": 4}
        dumps[2]["pg_status"] = {"0": status}
    _, verdict = judged(dumps)
    assert [one.rank for one in verdict.check_first] == checked
    assert (verdict.kind, verdict.named) == ("NotJoined" if checked else "AllJoined", ())


SAME, LESS, NONE = [[4]], [[3]], []
SIZES: list[tuple[str, list[Any], list[Any], bool, bool]] = [
    # the operation, input and output of rank 1 (those of the others are [4]), a mismatch for us, for torch
    *((name, LESS, LESS, True, True) for name in ("all_reduce", "broadcast", "reduce", "allreduce_coalesced")),
    *((f"all_gather{name}", LESS, [[16]], True, True) for name in ("", "_into_tensor_coalesced")),
    ("_all_gather_base", LESS, [[16]], True, True),
    *((f"reduce_scatter{name}", LESS, SAME, True, True) for name in ("", "_tensor_coalesced")),
    ("_reduce_scatter_base", LESS, SAME, True, True),
    ("gather", LESS, NONE, True, True),
    ("gather", SAME, NONE, False, False),
    ("scatter", NONE, LESS, True, True),
    ("scatter", NONE, SAME, False, False),
    ("all_to_all", LESS, SAME, True, True),
    ("all_to_all", [[5]], [[5]], False, False),
    ("all_to_all", [[2], [2]], SAME, False, True),  # torch counts the first tensor only
    ("barrier", NONE, NONE, False, False),
    ("all_reduce", [[2, 2]], [[2, 2]], False, True),  # NCCL sees the number of elements only
]


@pytest.mark.torch
@pytest.mark.parametrize(("operation", "inputs", "outputs", "ours", "theirs"), SIZES)
def test_sizes_of_each_operation_are_compared_as_by_torch(
    operation: str, inputs: list[Any], outputs: list[Any], *, ours: bool, theirs: bool
) -> None:
    dumps = {rank: recorder(rank, [WORLD, ("0", operation)], 1) for rank in range(4)}
    whole = [[16]] if operation.startswith(("all_gather", "_all_gather")) else SAME
    larger = [[16]] if "reduce_scatter" in operation else SAME
    for dump in dumps.values():
        dump["entries"][-1]["input_sizes"], dump["entries"][-1]["output_sizes"] = larger, whole
        if operation == "barrier":
            dump["entries"][-1]["input_sizes"] = dump["entries"][-1]["output_sizes"] = NONE
    dumps[1]["entries"][-1]["input_sizes"], dumps[1]["entries"][-1]["output_sizes"] = inputs, outputs
    answer, _ = judged(dumps)
    assert (answer.kind == "Mismatch", bool(referee(dumps))) == (ours, theirs)
    assert not ours or answer.check_first == (1,)


@pytest.mark.parametrize("ahead", [(0, 1), (0, 2)])
def test_disjoint_groups_of_one_name_are_not_compared(ahead: tuple[int, int]) -> None:
    """`split_group` gives its parts one name. A rank waits for rank 3, and the group of two others has gone on."""
    behind = sorted({0, 1, 2, 3}.difference(ahead))
    calls = dict.fromkeys(ahead, [OWN[0]] * 5 + [WORLD]) | {behind[0]: [OWN[0]] * 2 + [WORLD], 3: [OWN[0]]}
    dumps = {rank: recorder(rank, of_rank, 5 if rank in ahead else 1) for rank, of_rank in calls.items()}
    for rank, dump in dumps.items():
        dump["pg_config"]["1"] = {"name": "1", "desc": "tp", "ranks": str([*ahead] if rank in ahead else behind)}
    answer, _ = judged(dumps)
    assert (answer.kind, answer.check_first) == ("NotJoined", (3,))


@pytest.mark.parametrize(
    ("completed", "own_id", "missing", "unknown"), [(1, "2", (2,), ()), (2, "2", (), ()), (1, "9", (), (2,))]
)
def test_group_without_a_record_is_judged_by_the_count_of_torch(
    completed: int, own_id: str, missing: tuple[int, ...], unknown: tuple[int, ...]
) -> None:
    """A dump may contain only open operations. Then only torch's own count shows what rank 2 has completed.

    Processes give the same id to different groups, so the ids of one process are compared with its names of groups.
    """
    dumps = {rank: recorder(rank, [WORLD, WORLD], 1) for rank in (0, 1, 3)}
    dumps[2] = recorder(2, [OWN[2]], 0)
    names = ("enqueued", "started", "completed")
    counts = {"0": completed, own_id: 1}
    dumps[2]["pg_status"] = {
        group: {f"last_{name}_collective": count for name in names} for group, count in counts.items()
    }
    answer, _ = judged(dumps)
    assert (answer.graph.pending[0].missing, answer.graph.pending[0].unknown) == (missing, unknown)


def test_a_rank_that_has_never_used_the_group_is_checked_first() -> None:
    """Torch's own count of a group without an operation is -1."""
    dumps = {rank: recorder(rank, [WORLD], 0) for rank in (0, 1, 3)} | {2: recorder(2, [OWN[2]], 1)}
    dumps[2]["pg_status"] = {
        group: {f"last_{name}_collective": count for name in ("enqueued", "started", "completed")}
        for group, count in (("0", -1), ("2", 1))
    }
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("NotJoined", [2])


DENIED = Fault(subject="pid 7", reason="PermissionDenied", detail="no right")
UNDUMPED = Group(key="x", activity="unknown", fault=DENIED, members=(Member(id=RankId(rank=0)),))
SCENE = build_scene(Grouping(groups=(UNDUMPED,)), None)
BLOCKED = Finding("RankBlocked", SCENE, (UNDUMPED,), confidence=Confidence.HIGH)


def test_gpu_that_has_not_started_what_others_have_is_checked_first() -> None:
    """torch records the start with TORCH_NCCL_ENABLE_TIMING=1. An aborted operation shows no start."""
    dumps = {rank: recorder(rank, [("0", "all_reduce_barrier")] * 3, 2) for rank in range(4)}
    for rank in (0, 1, 3):
        dumps[rank]["entries"][-1]["state"] = "started"
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("GpuBehind", [2])
    assert "Rank 2's GPU has not started all_reduce_barrier #3" in verdict.message
    for rank in (0, 1, 3):
        dumps[rank]["entries"][-1] |= {"state": "completed", "time_discovered_completed_ns": CREATED_NS + 601 * 10**9}
    assert judged(dumps)[1].check_first == ()


def test_stacks_that_answer_let_a_rank_be_named_with_medium_confidence() -> None:
    answer, verdict = judged({rank: recorder(rank, [WORLD] * (1 if rank == 2 else 2), 1) for rank in range(4)})
    named = recorder_dumps.qualify(BLOCKED._replace(kind="NotJoined", answer=answer, by_numbers=True), {})
    assert (named.confidence, verdict.confidence) == (Confidence.MEDIUM, Confidence.NONE)
    assert "This is the state at the moment when torch wrote its dumps." in verdict.message


def test_what_the_kernel_says_of_a_rank_is_not_hidden_by_dumps() -> None:
    _, alone = judged({0: recorder(0, [WORLD], 0)})
    records = {0: parse(recorder(0, [WORLD], 0)).recorders}
    qualified = recorder_dumps.qualify(BLOCKED, records)
    assert qualified._replace(open_then=BLOCKED.open_then) == BLOCKED
    assert [one.kind for one in sequence_numbers.evidence(qualified.open_then)] == ["sequence"]
    assert alone.kind == "RecordsOnly"


@pytest.mark.parametrize(
    ("operations", "completed", "kind", "checked", "says"),
    [
        ([8] * 4, [6, 6, 4, 6], "GpuBehind", [2], "Rank 2's GPU has not completed all_reduce #5 of the default group, "
         "which ranks 0-1,3 have; it is 2 operations behind."),
        ([8, 8, 4, 8], [4] * 4, "NotJoined", [2], "Rank 2 has not joined all_reduce #5 of the default group, where "
         "ranks 0-1,3 wait"),
        ([8, 8, None, 8], [4] * 4, "NotJoined", [2], "Rank 2 has no operation in a flight recorder dump, and ranks 0-1,3 "
         "wait for it in all_reduce #5"),
        ([12, 12, 8, 12], [10, 10, 4, 10], "RecordsOnly", [], ""),  # rank 2 was dumped before the others
    ],
)  # fmt: skip
def test_rank_that_the_dumps_show_behind_is_checked_first(
    operations: list[int | None], completed: list[int], kind: str, checked: list[int], says: str
) -> None:
    by_rank = enumerate(zip(operations, completed, strict=True))
    _, verdict = judged({rank: recorder(rank, [WORLD] * count, done) for rank, (count, done) in by_rank if count})
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == (kind, checked)
    assert says in verdict.message


PROGRAMS = st.lists(st.sampled_from([WORLD, ("1", "all_reduce"), ("2", "barrier")]), min_size=1, max_size=8)


@settings(max_examples=200)
@given(st.lists(st.tuples(PROGRAMS, st.integers(0, 8)), min_size=4, max_size=4))
def test_dumps_without_stacks_name_no_rank(drawn: list[tuple[Program, int]]) -> None:
    _, verdict = judged({rank: recorder(rank, program, first) for rank, (program, first) in enumerate(drawn)})
    assert verdict.named == ()
    assert "the moment when torch wrote its dumps" in verdict.message
