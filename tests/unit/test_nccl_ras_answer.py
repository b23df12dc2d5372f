"""The parser of NCCL's RAS status: JSON, text, and any other data that a job may send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.formats import nccl_ras_status
from hangwatch.formats.nccl_ras_status import BadAnswerError, Communicator, RasRank, parse
from tests import nccl_ras
from tests.nccl_ras import as_json, communicator, missing, rank

FOUR = [rank(number, 100 + number, AllReduce=7 - (number == 3), Send=number) for number in range(4)]


def read(answer: str) -> Communicator:
    return parse(answer.encode()).communicators[0]


def test_json_has_the_counts_of_each_rank() -> None:
    status = parse(as_json(communicator(FOUR)).encode())
    one = status.communicators[0]
    assert (status.version, one.name, one.size) == ("2.28.9", "0x27a079b828ff1a75/0x5:0x6", 4)
    assert [dict(found.counts)["AllReduce"] for found in one.ranks] == [7, 7, 7, 6]
    assert (one.ranks[3].host, one.ranks[3].pid) == ("127.0.0.1", 103)
    assert (one.is_listed, one.is_running, one.unreached) == (True, True, ())


def test_json_of_nccl_2_28_9_without_a_comma_is_read() -> None:
    broken = nccl_ras.without_comma(as_json(communicator(FOUR[:3], [missing(3, 103)])))
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    one = read(broken)
    assert [(lost.rank, lost.pid) for lost in one.unreached] == [(3, 103)]
    assert one.is_listed


def test_missing_rank_that_answered_is_not_unreached() -> None:
    one = read(as_json(communicator(FOUR[:3], [missing(3, 103, unresponsive=False)])))
    assert (one.unreached, one.is_listed) == ((), False)


@pytest.mark.parametrize("state", [{"init_state": 7}, {"abort_flag": True}, {"finalize_called": True}])
def test_a_communicator_at_its_start_or_end_is_not_running(state: dict[str, Any]) -> None:
    first = {**FOUR[0], "status": {**FOUR[0]["status"], **state}}
    assert not read(as_json(communicator([first, *FOUR[1:]]))).is_running


def test_text_has_only_ranks_that_differ() -> None:
    status = parse(nccl_ras.TEXT.format(pid=103, host="10.0.0.7").encode())
    assert status.version == "2.26.2"
    assert status.communicators == (
        Communicator(
            name="0x79b828ff1a7527",
            size=4,
            ranks=(RasRank(rank=3, host="10.0.0.7", pid=103, counts=(("AllReduce", 60),)),),
            rest=(("AllReduce", 64),),
        ),
    )


def test_text_with_several_ranks_of_one_count_is_read() -> None:
    # NCCL's text about 32 ranks lists only the few late ones.
    several = """NCCL version 2.24.3 compiled with CUDA 12.4
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  29 ranks have launched up to operation 6650
  2 ranks have not launched any operations
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 (NVML 3) managed by process 483074 on node 172.16.64.210
  Rank 9 has launched up to operation 6651 -- [process information not found]
"""
    one = read(several)
    assert {found.rank: dict(found.counts)["collective"] for found in one.ranks} == {0: 0, 2: 0, 9: 6651}
    assert one.rest == (("collective", 6650),)
    assert (one.ranks[1].host, one.ranks[1].pid, one.ranks[2].host) == ("172.16.64.210", 483074, "")


def test_text_with_unresponsive_ranks_is_read() -> None:
    lost = """NCCL version 2.26.2 compiled with CUDA 12.6
    0         1         1         4         4         4   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 103 on node 10.0.0.7 managing GPU 3

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 3 managed by process 103 on node 10.0.0.7

"""
    assert read(lost).unreached == (RasRank(rank=3, host="10.0.0.7", pid=103),)


def test_text_of_ranks_in_different_states_is_not_running() -> None:
    text = nccl_ras.TEXT.format(pid=1, host="10.0.0.7")
    line = "  Communicator ranks have different status\n  3 ranks have status RUNNING\n"
    changed = text.replace("MISMATCH\n  Comm", f"MISMATCH\n{line}  Comm")
    assert changed != text
    assert not read(changed).is_running


HOSTILE = {
    "nothing": "",
    "not the JSON": "{",
    "NaN": as_json(communicator(FOUR)).replace('"AllReduce": 7', '"AllReduce": NaN'),
    "a count below zero": as_json(communicator(FOUR)).replace('"AllReduce": 7', '"AllReduce": -7'),
    "a count that no counter reaches": as_json(communicator(FOUR)).replace('"AllReduce": 7', f'"AllReduce": {10**400}'),
    "a text for a number": as_json(communicator(FOUR)).replace('"AllReduce": 7', '"AllReduce": "7"'),
    "deep": '{"nccl_version": "2.28.9", "communicators": [], "ras": ' + "[" * 200_000,
    "a rank twice": as_json(communicator([FOUR[0], FOUR[0]])),
    "a rank outside": as_json(communicator([rank(9, 1)])),
    "an invalid name": as_json(communicator(FOUR, name="0x\n1b[31m")),
    "an invalid version": as_json(communicator(FOUR), version="2.28\x1b[31m"),
    "another program": "HTTP/1.1 400 Bad Request\r\n\r\n",
    "too long": " " * (nccl_ras_status.MOST_BYTES + 1),
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_text_that_is_not_a_status_is_an_error(answer: str) -> None:
    with pytest.raises(BadAnswerError):
        parse(answer.encode())


@pytest.mark.parametrize("host", ["\x1b[31mroot", "fe80::1%\x1b[31mroot", "10.0.0.256", "10.0.0.1\n"])
def test_large_count_is_kept_and_invalid_host_is_dropped(host: str) -> None:
    one = read(as_json(communicator([rank(0, -5, host=host, AllReduce=10**9)])))
    assert (dict(one.ranks[0].counts)["AllReduce"], one.ranks[0].host) == (10**9, "")


LINES = st.sampled_from(nccl_ras.TEXT.format(pid=1, host="10.0.0.7").splitlines())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _is_bounded(communicator: Communicator) -> bool:
    counts = [count for found in communicator.ranks for _, count in found.counts]
    return all(found.rank < communicator.size for found in communicator.ranks) and all(
        0 <= count < 1 << 53 for count in counts
    )


@given(st.binary(max_size=400) | st.lists(LINES | st.text(max_size=60), max_size=30).map("\n".join).map(str.encode))
def test_any_text_is_read_or_refused(raw: bytes) -> None:
    try:
        status = parse(b"NCCL version 2.26.2 compiled with CUDA 12.6\n" + raw)
    except BadAnswerError:
        return
    assert all(map(_is_bounded, status.communicators))


@given(st.data())
def test_a_json_with_any_value_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    answer: Any = json.loads(as_json(communicator(FOUR[:2], [missing(2, 5)])))
    place, path = answer, data.draw(st.lists(st.integers(0, 9), max_size=6))
    for step in path:
        keys = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        if not keys:
            break
        key = keys[step % len(keys)]
        if data.draw(st.booleans()) or not isinstance(place[key], (dict, list)):
            place[key] = data.draw(VALUES)
            break
        place = place[key]
    try:
        status = parse(json.dumps(answer, indent=2).encode())
    except BadAnswerError:
        return
    assert all(map(_is_bounded, status.communicators))
