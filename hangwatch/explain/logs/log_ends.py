"""Pure: where the logs of ranks end -> who ends alike, who before the others, and whose log may not be written out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.explain.logs.merged_logs import RankLog
from hangwatch.explain.logs.rank_log import Moment, common_clock, time_on
from hangwatch.model import RankId

SHOWN = 3
LINE_CHARACTERS = 80
TIMES_AS_MANY = 3  # the others, where some stand apart
_MOST_STEPS = 3  # at which ranks end, where no majority tells which is the usual one
_MOST_DIGITS = 18
_APART_SECONDS = 60.0
_NUMBER = re.compile(r"0x[0-9a-fA-F]{1,16}|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class End(NamedTuple):
    """Ranks whose logs end alike, shown by the lowest; `step` is the number in which they differ from the others.

    `text` has the range of whole numbers that differ among them.
    """

    ids: tuple[RankId, ...]
    text: str
    moment: Moment | None
    template: str
    step: float


def fold(logs: Sequence[RankLog]) -> list[End]:
    """The last lines, folded: by their words, and by the first number that most of them share and some do not."""
    by_template: dict[tuple[str, int], list[RankLog]] = defaultdict(list)
    for log in logs:
        if log.last is not None:
            by_template[without_numbers(log.last.text), len(_written(log))].append(log)  # a line may have a "#" itself
    ends: list[End] = []
    for (template, _), alike in by_template.items():
        column = _step_column([_numbers(log) for log in alike], _few_steps(alike))
        by_step: dict[float, list[RankLog]] = defaultdict(list)
        for log in alike:
            by_step[0.0 if column is None else _numbers(log)[column]].append(log)
        ends += (_end(found, template, step) for step, found in by_step.items())
    return sorted(ends, key=lambda end: (-len(end.ids), end.ids[0].sort_key()))


def _end(logs: Sequence[RankLog], template: str, step: float) -> End:
    moments = [log.last.moment for log in logs if log.last]
    clock = common_clock(moments)
    last = max(moments, key=lambda moment: time_on(moment, clock)[1] if moment else float("-inf"))
    return End(tuple(log.id for log in logs), _with_ranges(logs), last, template, step)


def _with_ranges(logs: Sequence[RankLog]) -> str:
    """The last line of the first, with "299..300" for a whole number that differs among them and is not their own."""
    text = logs[0].last.text if logs[0].last else ""
    columns = list(zip(*(_written(log) for log in logs), strict=True))
    told = [_range(column, logs) for column in columns]
    numbers = iter(told)
    return _NUMBER.sub(lambda found: next(numbers) or found.group(), text)


def _range(column: Sequence[str], logs: Sequence[RankLog]) -> str:
    if not _tells_steps(column, logs):
        return ""
    numbers = [int(number) for number in column]
    return f"{min(numbers)}..{max(numbers)}"


def _tells_steps(column: Sequence[str], logs: Sequence[RankLog]) -> bool:
    """Whether these are whole numbers that differ, and no names of the ranks themselves."""
    if len(set(column)) < 2 or not all(number.isdecimal() and len(number) <= _MOST_DIGITS for number in column):
        return False
    own = [{log.id.rank, log.id.local_rank, log.id.pid} for log in logs]
    return not all(int(number) in names for number, names in zip(column, own, strict=True))


def _written(log: RankLog) -> list[str]:
    return _NUMBER.findall(log.last.text) if log.last else []


def _numbers(log: RankLog) -> tuple[float, ...]:
    return tuple(float(int(text, 16)) if text.startswith("0x") else float(text) for text in _written(log))


def _few_steps(logs: Sequence[RankLog]) -> list[int]:
    """The places of whole numbers that tell how far a rank came: few different ones."""
    columns = enumerate(zip(*(_written(log) for log in logs), strict=True))
    return [place for place, column in columns if len(set(column)) <= _MOST_STEPS and _tells_steps(column, logs)]


def _step_column(rows: Sequence[tuple[float, ...]], few: Sequence[int]) -> int | None:
    """The number that tells how far a rank came: more than half of them show the same, and some show another one.

    A whole number of which there are `few` before any other one: a loss agrees by chance.
    """
    places: tuple[int, ...] = (*few, *range(len(rows[0])))
    for index in places:
        counts = Counter(row[index] for row in rows)
        if len(counts) > 1 and counts.most_common(1)[0][1] * 2 > len(rows):
            return index
    return few[0] if few else None


def behind(ends: Sequence[End]) -> End | None:
    """The few ranks whose log ends at an earlier step than that of at least three times as many."""
    if not ends:
        return None
    most = ends[0]
    behind = [end for end in ends[1:] if end.template == most.template and end.step < most.step]
    few = min(behind, key=lambda end: end.step, default=None)
    return few if few and len(most.ids) >= TIMES_AS_MANY * sum(len(end.ids) for end in ends[1:]) else None


def unwritten(logs: Sequence[RankLog]) -> dict[RankId, str]:
    """Whose log may end in a buffer that was not written out, and what says so.

    Its last line is the beginning of what most others wrote; or it ends minutes before theirs: ranks of one job wait
    for each other, so that none can be so far ahead.
    """
    last = [(log.id, log.last) for log in logs if log.last is not None]
    counts = Counter(without_numbers(line.text) for _, line in last)
    wholes = [whole for whole, _ in counts.most_common(SHOWN)]
    clock = common_clock([line.moment for _, line in last])
    middle = sorted(line.moment.seconds for _, line in last if line.moment and line.moment.clock == clock)
    found = {}
    for rank, line in last:
        begun, moment = without_numbers(line.text), line.moment
        apart = middle[len(middle) // 2] - moment.seconds if moment and moment.clock == clock else 0.0
        if any(whole != begun and whole.startswith(begun) and counts[begun] < counts[whole] for whole in wholes):
            found[rank] = "its last line is cut"
        elif apart > _APART_SECONDS:
            found[rank] = f"it ends {words.duration(apart)} before the others"
    return found


def caveat(ranks: Sequence[RankId], unwritten: Mapping[RankId, str]) -> str:
    """`; the log of rank 7 may end in a buffer that was not written out (its last line is cut)`, or nothing."""
    unsure = [rank for rank in ranks if rank in unwritten]
    if not unsure:
        return ""
    return f"; the log of {words.who(unsure)} may end in a buffer that was not written out ({unwritten[unsure[0]]})"


def told(ends: Sequence[End]) -> str:
    """`63 ranks end at 'backward 812', rank 7 at 'backward 811'`."""
    told = []
    for number, end in enumerate(ends[:SHOWN]):
        who = words.count(len(end.ids)) if len(end.ids) > SHOWN else words.who(end.ids)
        verb = " end" if len(end.ids) > 1 else " ends"
        moment = f" ({words.elided(end.moment.text, LINE_CHARACTERS)})" if end.moment else ""
        told.append(f"{who}{verb if number == 0 else ''} at '{words.elided(end.text, LINE_CHARACTERS)}'{moment}")
    more = sum(len(end.ids) for end in ends[SHOWN:])
    return ", ".join(told) + (f", {words.count(more)} elsewhere" if more else "")


def without_numbers(text: str) -> str:
    """What lines of one kind have in common."""
    return _NUMBER.sub("#", text)
