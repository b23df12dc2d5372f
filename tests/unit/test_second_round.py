"""The conditions for a second round of `hangwatch dump`."""

from typing import Any

import pytest
from msgspec import structs

from hangwatch.verdict import second_round
from tests.hangs import TABLE, rank_dumps
from tests.unit.test_waitfor import record, recorder

ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
LOADER = ["get (queue.py:180)", "_try_get_data (torch/utils/data/dataloader.py:1131)"]
SAVE = "save (torch/serialization.py:965)"


def is_needed(**stand: Any) -> bool:
    waiting = {"ranks": "0-2", "utilization": 1.0, "frames": [ALL_REDUCE, "train (train.py:50)"]}
    return second_round.is_needed(rank_dumps({"stands": [waiting, {"ranks": "3", **stand}]}), TABLE)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([ALL_REDUCE], False),
        ([SAVE], True),
        (LOADER, True),
        (["update_cache (cache.py:21)"], True),
        (["synchronize (torch/cuda/__init__.py:800)"], True),
        (["write_text (pathlib.py:1015)"], True),
        (["wait (threading.py:320)"], True),
    ],
)
def test_second_round_is_needed_for_a_rank_outside_a_wait_for_ranks(frames: list[str], expected: bool) -> None:
    assert is_needed(frames=[*frames, "train (train.py:40)"], utilization=0.0) is expected


def test_second_round_is_needed_for_a_rank_with_a_flight_recorder() -> None:
    waiting = rank_dumps({"stands": [{"ranks": "0-3", "utilization": 1.0, "frames": [ALL_REDUCE]}]})
    assert not second_round.is_needed(waiting, TABLE)
    last = structs.replace(waiting[0].rounds[-1], recorders=(recorder(record(3)),))
    assert second_round.is_needed([structs.replace(waiting[0], rounds=(last,)), *waiting[1:]], TABLE)


def test_rank_without_stack_needs_no_second_round() -> None:
    assert not is_needed(gone=True)
    assert not is_needed(fault=["ProcessGone", "the process has ended", "target"])
