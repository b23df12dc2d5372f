"""The series of one scrape, added to the families of the table, and texts for labels."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric

from hangwatch import words
from hangwatch.metrics.families import FAMILIES, Family
from hangwatch.model import JobName, Rank, RankId

LABEL_LENGTH = 200
NAMED_RANKS_SHOWN = 16


class Series:
    """The series of one scrape, by family. A family without series has only its name, text and type."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[Metric, tuple[str, ...]]] = {}
        for name, family in FAMILIES.items():
            self.declare(name, family)

    def declare(self, name: str, family: Family) -> None:
        """Add a family without series, unless it is there already."""
        if name not in self._families:
            metric = Metric(f"hangwatch_{name.removesuffix('_total')}", family.text, family.kind)
            self._families[name] = metric, family.labels

    def add(self, name: str, labels: Iterable[str], value: float) -> None:
        """Add a series to a gauge or a counter: the values of its labels, in the order of the table, and its number."""
        metric, names = self._families[name]
        suffix = "_total" if metric.type == "counter" else ""
        metric.add_sample(f"{metric.name}{suffix}", dict(zip(names, labels, strict=True)), value)

    def add_histogram(self, name: str, bounds: Iterable[object], counts: Iterable[int], total: float) -> None:
        """Add the series of a histogram: the upper bounds and counts of its buckets, and the sum of all values."""
        metric, count = self._families[name][0], 0
        for bound, more in zip(bounds, counts, strict=True):
            count += more
            metric.add_sample(f"{metric.name}_bucket", {"le": str(bound)}, count)
        metric.add_sample(f"{metric.name}_count", {}, count)
        metric.add_sample(f"{metric.name}_sum", {}, total)

    @property
    def families(self) -> list[Metric]:
        """All families, in the order in which they were declared."""
        return [metric for metric, _ in self._families.values()]


def name_labels(name: JobName) -> tuple[str, ...]:
    """Return the values of the labels that every series of a job has."""
    return name.job_id, name.job_key


def rank_labels(rank: Rank | RankId) -> tuple[str, str]:
    """Return the values of the labels `rank` and `local_rank`."""
    return number_text(rank.rank), number_text(rank.local_rank)


def number_text(number: int | None) -> str:
    """Return a number as a label; "" if it is unknown."""
    return "" if number is None else str(number)


def sentence_label(text: str) -> str:
    """Return a sentence as a label. A long sentence is cut between two words, never inside a number."""
    text = words.printable(text)
    if len(text) <= LABEL_LENGTH:
        return text
    cut = text[:LABEL_LENGTH]
    return f"{cut.rpartition(' ')[0].rstrip(' ,;:') or cut[:-1]}…"


def yes_or_no(fact: bool) -> str:
    """Return "yes" or "no", as a label."""
    return "yes" if fact else "no"


def ranks_label(ranks: Sequence[RankId], node: str) -> str:
    """Return ranks as a label: `node:rank` for at most 16 of them, then the number of further ranks."""
    names = [
        f"{rank_id.node or node}:{number_text(rank_id.rank if rank_id.rank is not None else rank_id.local_rank)}"
        for rank_id in ranks
    ]
    more = len(names) - NAMED_RANKS_SHOWN
    return ",".join(names[:NAMED_RANKS_SHOWN]) + (f",+{more}" if more > 0 else "")
