"""When `hangwatch dump` takes a second round of its own accord."""

from __future__ import annotations

from typing import Any

import pytest

from hangwatch.verdict import second_round
from tests.hangs import TABLE, rank_dumps

ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
LOADER = ["get (queue.py:180)", "_try_get_data (torch/utils/data/dataloader.py:1131)"]
SAVE = "save (torch/serialization.py:965)"


def is_needed(**stand: Any) -> bool:
    waiting = {"ranks": "0-2", "utilization": 1.0, "frames": [ALL_REDUCE, "train (train.py:50)"]}
    return second_round.is_needed(rank_dumps({"stands": [waiting, {"ranks": "3", **stand}]}), TABLE)


@pytest.mark.parametrize(
    ("frames", "utilization", "expected"),
    [
        ([ALL_REDUCE], 1.0, False),
        ([SAVE], 0.0, False),
        ([SAVE], None, False),
        ([SAVE], 1.0, True),
        (LOADER, 0.0, True),
        (["update_cache (cache.py:21)"], 0.0, True),
        (["update_cache (cache.py:21)"], None, True),
        (["synchronize (torch/cuda/__init__.py:800)"], 0.0, True),
        (
            ["load_shard (train.py:9)", "_run (asyncio/events.py:88)", "_run_once (asyncio/base_events.py:1986)"],
            0.0,
            True,
        ),
        (["select (selectors.py:468)", "_run_once (asyncio/base_events.py:1949)"], 0.0, False),
    ],
)
def test_second_round_is_needed_where_one_may_mislead(
    frames: list[str], utilization: float | None, expected: bool
) -> None:
    assert is_needed(frames=[*frames, "train (train.py:40)"], utilization=utilization) is expected


def test_rank_without_stack_needs_no_second_round() -> None:
    assert not is_needed(gone=True)
    assert not is_needed(fault=["ProcessGone", "the process has ended", "target"])
