"""Texts for labels of metrics."""

from collections.abc import Sequence

from hangwatch import words
from hangwatch.model import RankId

LABEL_LENGTH = 200
NAMED_RANKS_SHOWN = 16


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
