"""How series are made: families under one prefix, and what their labels hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hangwatch import words
from hangwatch.model import JobName, RankId

JOB = JobName.__struct_fields__  # of every series of a job
LABEL_LENGTH = 200
NAMED_RANKS_SHOWN = 16


def gauge(name: str, text: str, labels: Iterable[str] = ()) -> GaugeMetricFamily:
    """A gauge of hangwatch, with these labels, and no series yet."""
    return GaugeMetricFamily(f"hangwatch_{name}", text, labels=list(labels))


def single(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A gauge of hangwatch with one series, without labels."""
    return GaugeMetricFamily(f"hangwatch_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """A counter of hangwatch with one series, without labels."""
    return CounterMetricFamily(f"hangwatch_{name}", text, value=value)


def number_text(number: int | None) -> str:
    """A number in a label; empty where it is not known."""
    return "" if number is None else str(number)


def sentence(text: str) -> str:
    """A sentence in a label: one that is too long ends between two words, so that no number is cut to another one."""
    text = words.printable(text)
    if len(text) <= LABEL_LENGTH:
        return text
    cut = text[:LABEL_LENGTH]
    return f"{cut.rpartition(' ')[0].rstrip(' ,;:') or cut[:-1]}…"


def yes(fact: bool) -> str:
    """A fact in a label."""
    return "yes" if fact else "no"


def folded(ranks: Sequence[RankId], node: str) -> str:
    """Ranks in a label, each behind its node; beyond the first ones how many more."""
    names = [f"{who.node or node}:{number_text(who.rank if who.rank is not None else who.local_rank)}" for who in ranks]
    more = len(names) - NAMED_RANKS_SHOWN
    return ",".join(names[:NAMED_RANKS_SHOWN]) + (f",+{more}" if more > 0 else "")
