"""The schedule of the daemon, stopped at any moment."""

from __future__ import annotations

import random
import threading

import pytest

from hangwatch.beats import Beats
from tests.conftest import wait_for


def test_it_can_be_stopped_while_it_starts_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends by itself: an error would be on the terminal of everybody who types Ctrl-C."""
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    chance, calls = random.Random(0), [0]
    for _ in range(40):
        beats = Beats(lambda name: None)
        for _ in range(200):
            beats.once("slow", lambda: calls.__setitem__(0, calls[0] + 1))
        before, some = calls[0], chance.randrange(150)
        beats.start()
        wait_for(lambda: calls[0] >= before + some, "some of the calls")  # noqa: B023 - asked at once
        beats.stop()
    assert not died, died[0].exc_value
