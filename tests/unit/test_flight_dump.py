"""Flight-recorder dumps of every torch version, and files that are not dumps.

A dump is a pickle, so a hostile file could run a program.
"""

import json
import os
import pickle
import resource
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.explain import file_names
from hangwatch.explain.flight_dumps import rank_recorders, recorder_dump
from hangwatch.explain.flight_dumps.rank_recorders import DumpFile
from hangwatch.formats import safe_pickle
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


# --- dumps of torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_and_the_same_as_json_are_read_alike(protocol: int) -> None:
    value = dumped(entry(0), entry(1), entry(2, state="started", retired=False, time_discovered_completed_ns=None))
    found = recorder_dump.parse(as_pickle(value, protocol))
    (recorder,) = found.recorders
    assert [record.is_open for record in recorder.records] == [False, False, True]
    assert [record.completed_unix_ns for record in recorder.records] == [CREATED_NS + 5, CREATED_NS + 6, 0]
    assert (recorder.library, recorder.next_id, recorder.oldest_id, recorder.is_wrapped) == ("nccl", 3, 0, False)
    assert (found.world_size, found.possible_ranks) == (4, ((0, 3),))
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
}


@pytest.mark.parametrize(("given", "counts"), LIBRARIES.values(), ids=LIBRARIES)
def test_what_is_open_is_told_by_each_library_in_its_own_way(given: dict[str, object], counts: bool) -> None:
    assert bool(list(parse(dumped(entry(0, **given))).opened)) == counts


def test_a_batch_is_open_where_the_record_that_closes_it_is() -> None:
    batch = {"state": "scheduled", "retired": False, "is_p2p": True, "p2p_seq_id": 1}
    part = entry(0, profiling_name="nccl:send 1->2", **batch)
    closing = entry(1, profiling_name="nccl:coalesced", **batch)
    assert [one.operation for one in parse(dumped(part, closing)).opened] == ["nccl:coalesced"]


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
    assert parse(dumped(send, pg_config=group)).possible_ranks == ((6, 6),)


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
            assert str(error).startswith(("is ", "has ", "holds ", "needs ", "may ")) and str(error).isprintable()


# --- hostile pickles ---------------------------------------------------------------------------------------------------


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


def test_the_second_door_is_shut_as_well(touched: Path) -> None:
    for name in ("GLOBAL", "STACK_GLOBAL", "BINPERSID"):
        with pytest.raises(ValueError, match=r"names|refers to"):
            safe_pickle._Unpickler(__import__("io").BytesIO(programs(touched)[name])).load()
    assert not touched.exists()


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
import pathlib, re, resource, sys
from hangwatch.explain.flight_dumps import recorder_dump as flight_dump
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
content = open(sys.argv[1], "rb").read()
try:
    flight_dump.parse(content)
except ValueError as error:
    print(error)
print(int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text()).group(1)) >> 10, "MiB")
"""


def in_a_child(content: bytes, folder: Path) -> tuple[str, int, float]:
    """Parse `content` in a child process with 2 GiB. Return the reason of the fault, the used MiB, and CPU seconds."""
    path = folder / "bomb"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = finished(sys.executable, "-c", IN_A_CHILD, path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-500:]
    why, mebibytes = done.stdout.strip().rsplit("\n", 1)
    return why, int(mebibytes.split()[0]), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_is_refused_within_bounds(name: str, tmp_path: Path) -> None:
    why, mebibytes, seconds = in_a_child(BOMBS[name](), tmp_path)
    print(f"{name}: {why}; {mebibytes} MiB, {seconds:.1f} s of CPU")
    assert why.startswith(("is ", "has ", "holds ", "needs ", "may "))
    assert mebibytes < 700
    assert seconds < 20


@pytest.mark.parametrize("text", ["[" * 1_000_000, "[[]," * 3_000_000, '{"a":' * 500_000, "0," * 8_000_000])
def test_json_that_grows_or_nests_is_refused_within_bounds(text: str, tmp_path: Path) -> None:
    why, mebibytes, seconds = in_a_child(b'{"pg_config":' + text.encode(), tmp_path)
    print(f"{why}; {mebibytes} MiB, {seconds:.1f} s of CPU")
    assert why.startswith(("is not complete JSON", "holds more values"))
    assert mebibytes < 400
    assert seconds < 20


def test_one_value_at_many_places_is_not_counted_out(tmp_path: Path) -> None:
    """Reject a small pickle that expands to 10^10 numbers.

    Its list of 100,000 numbers is referenced many times.
    """
    numbers = [7] * 100_000
    sizes = [numbers] * 100_000
    one = entry(0, input_sizes=sizes, frames=sizes)
    ranks = "[" + ", ".join(map(str, range(100_000))) + "]"
    groups = {str(number): {"name": str(number), "desc": "", "ranks": ranks} for number in range(4000)}
    for value in (dumped(*[one] * 100_000), dumped(one, pg_config=groups)):
        why, mebibytes, seconds = in_a_child(as_pickle(value), tmp_path)
        print(f"{why}; {mebibytes} MiB, {seconds:.1f} s of CPU")
        assert why.startswith(("has entries that are not in the order", "lists more than"))
        assert mebibytes < 700
        assert seconds < 60


# --- rank and time of a dump -----------------------------------------------------------------------------------------


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
def test_the_rank_of_a_dump_is_the_number_at_the_end_of_its_name(
    given: list[str], expected: Mapping[str, tuple[int, bool]]
) -> None:
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


def test_of_two_dumps_of_a_rank_the_later_counts() -> None:
    later = dumped(entry(0), entry(1, time_created_ns=CREATED_NS + 10**9))
    joined = rank_recorders.join(files(old_rank_0=None, new_rank_0=later))
    assert joined.by_rank[0][0].next_id == 2
    assert [note for note in joined.notes if note.endswith("used: new_rank_0")]


def test_several_dumps_of_many_ranks_are_one_note() -> None:
    joined = rank_recorders.join(files(**{f"{run}_rank_{rank}": None for run in ("old", "new") for rank in range(4)}))
    (note,) = (note for note in joined.notes if "several dumps" in note)
    assert note.startswith("ranks 0-3 have several dumps")


@pytest.mark.parametrize(("hours", "ranks"), [(0.9, [0, 1, 2]), (1.1, [1, 2])])
def test_dump_of_an_earlier_run_is_ignored_by_the_times_in_it(hours: float, ranks: list[int]) -> None:
    later = dumped(entry(0, time_created_ns=CREATED_NS + int(hours * 3600 * 10**9)))
    joined = rank_recorders.join(files(fr_rank_0=None, fr_rank_1=later, fr_rank_2=dumped()))
    assert sorted(joined.by_rank) == ranks
    assert [note.startswith("flight recorder of rank 0") for note in joined.notes] == [True] * (3 - len(ranks))


def test_a_buffer_of_20_000_operations_with_their_stacks_is_read_in_time() -> None:
    frames = [{"name": "step", "filename": "/srv/job/train.py", "line": 7}] * 60
    content = as_pickle(dumped(*(entry(number, frames=frames) for number in range(20_000))))
    began = time.process_time()
    found = recorder_dump.parse(content)
    seconds = time.process_time() - began
    print(f"{len(content) / 1e6:.1f} MB in {seconds:.1f} s of CPU")
    assert len(found.recorders[0].records) == 20_000
    assert seconds < 20
    last: Any = found.last
    assert str(last.frame) == "step (train.py:7)"
