"""Groups of ranks with the same end of their logs, ranks that are behind, and logs that may be incomplete. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.formats.log_times import Moment, common_clock, time_on
from hangwatch.logs.failures import NUMBER, TEXTS, without_numbers
from hangwatch.logs.merged_logs import RankLog
from hangwatch.model import RankId, list_by_key

SHOWN = 3
LINE_CHARACTERS = 80
TIMES_AS_MANY = 3  # ranks in the majority for each rank that is behind
_MOST_STEPS = 3  # different steps at which ranks may end, if there is no majority
_MOST_DIGITS = 18
_APART_SECONDS = 60.0


class End(NamedTuple):
    """Ranks with the same end of their logs. `step` is the number in which they differ from the other ranks.

    `text` is the line of the lowest rank, with a range for each integer that differs within the group. `template` is
    that line without its numbers.
    """

    ids: tuple[RankId, ...]
    text: str
    moment: Moment | None
    template: str
    step: float


def fold(logs: Sequence[RankLog]) -> list[End]:
    """Group the ranks by the last lines of their logs.

    Ranks of one group have the same text without numbers, and the same step (see `_find_step_column`).
    """
    # The count of numbers matters because a line may contain a "#".
    by_template = list_by_key(
        ((without_numbers(log.last.text), len(_find_numbers(log))), log) for log in logs if log.last is not None
    )
    ends: list[End] = []
    for (template, _), alike in by_template.items():
        columns = zip(*(_find_numbers(log) for log in alike), strict=True)
        few = [
            index
            for index, column in enumerate(columns)
            if len(set(column)) <= _MOST_STEPS and _is_step_column(column, alike)
        ]
        column = _find_step_column([_read_numbers(log) for log in alike], few)
        by_step = list_by_key((0.0 if column is None else _read_numbers(log)[column], log) for log in alike)
        ends += (_make_end(same_step, template, step) for step, same_step in by_step.items())
    return sorted(ends, key=lambda end: (-len(end.ids), end.ids[0].sort_key()))


def _make_end(logs: Sequence[RankLog], template: str, step: float) -> End:
    moments = [log.last.moment for log in logs if log.last]
    clock = common_clock(moments)
    last = max(moments, key=lambda moment: time_on(moment, clock)[1] if moment else float("-inf"))
    return End(tuple(log.id for log in logs), _write_ranges(logs), last, template, step)


def _write_ranges(logs: Sequence[RankLog]) -> str:
    """Return the last line of the first log. An integer that differs between logs is a range such as "299..300"."""
    text = logs[0].last.text if logs[0].last else ""
    ranges = (
        f"{min(column, key=int)}..{max(column, key=int)}" if _is_step_column(column, logs) else ""
        for column in zip(*(_find_numbers(log) for log in logs), strict=True)
    )
    return NUMBER.sub(lambda match: next(ranges) or match.group(), text)


def _is_step_column(column: Sequence[str], logs: Sequence[RankLog]) -> bool:
    """True if the column contains different integers that are not the ranks, local ranks or pids of the logs."""
    if len(set(column)) < 2 or not all(number.isdecimal() and len(number) <= _MOST_DIGITS for number in column):
        return False
    ids = [{log.id.rank, log.id.local_rank, log.id.pid} for log in logs]
    return not all(int(number) in rank_ids for number, rank_ids in zip(column, ids, strict=True))


def _find_numbers(log: RankLog) -> list[str]:
    return NUMBER.findall(log.last.text) if log.last else []


def _read_numbers(log: RankLog) -> tuple[float, ...]:
    return tuple(float(int(text, 16)) if text.startswith("0x") else float(text) for text in _find_numbers(log))


def _find_step_column(rows: Sequence[tuple[float, ...]], few: Sequence[int]) -> int | None:
    """Return the position of the number that shows a rank's progress; None if there is none.

    More than half of the ranks share this number, and some differ. The positions in `few`, of integers with few
    different values, are tried first, because a number such as a loss may agree by chance.
    """
    positions: tuple[int, ...] = (*few, *range(len(rows[0])))
    for index in positions:
        counts = Counter(row[index] for row in rows)
        if len(counts) > 1 and counts.most_common(1)[0][1] * 2 > len(rows):
            return index
    return few[0] if few else None


def find_behind(ends: Sequence[End]) -> End | None:
    """Return the ranks with a log that ends at an earlier step than the others; None if there are none.

    The logs of at least three times as many ranks must end at one later step.
    """
    if not ends:
        return None
    most = ends[0]
    earlier = [end for end in ends[1:] if end.template == most.template and end.step < most.step]
    few = min(earlier, key=lambda end: end.step, default=None)
    return few if few and len(most.ids) >= TIMES_AS_MANY * sum(len(end.ids) for end in ends[1:]) else None


def find_unwritten(logs: Sequence[RankLog]) -> dict[RankId, str]:
    """Return the ranks with a log that may be incomplete because of a buffer, and the reason for each.

    The last line of such a log is the beginning of the last line of most others, or the log ends minutes before theirs.
    Ranks of one job wait for each other, so no rank can be so far ahead.
    """
    last = [(log.id, log.last) for log in logs if log.last is not None]
    counts = Counter(without_numbers(line.text) for _, line in last)
    wholes = [whole for whole, _ in counts.most_common(SHOWN)]
    clock = common_clock([line.moment for _, line in last])
    middle = sorted(line.moment.seconds for _, line in last if line.moment and line.moment.clock == clock)
    reasons = {}
    for rank, line in last:
        begun, moment = without_numbers(line.text), line.moment
        apart = middle[len(middle) // 2] - moment.seconds if moment and moment.clock == clock else 0.0
        if any(whole != begun and whole.startswith(begun) and counts[begun] < counts[whole] for whole in wholes):
            reasons[rank] = "its last line is cut"
        elif apart > _APART_SECONDS:
            reasons[rank] = f"it ends {words.duration(apart)} before the other logs"
    return reasons


def caveat(ranks: Sequence[RankId], unwritten: Mapping[RankId, str]) -> str:
    """Return a clause such as `; the log of rank 7 may end in a buffer ...`; "" if all logs are complete."""
    unsure = [rank for rank in ranks if rank in unwritten]
    lack = "may lack lines that were still in a buffer"
    return f"; the log of {words.name_ranks(unsure)} {lack} ({unwritten[unsure[0]]})" if unsure else ""


def describe_ends(ends: Sequence[End]) -> str:
    """Return a clause on the ends: `63 ranks end at 'backward 812', rank 7 at 'backward 811'`."""
    clauses = []
    for number, end in enumerate(ends[:SHOWN]):
        ranks = words.count(len(end.ids)) if len(end.ids) > SHOWN else words.name_ranks(end.ids)
        verb = " end" if len(end.ids) > 1 else " ends"
        moment = f" ({words.elided(end.moment.text, LINE_CHARACTERS)})" if end.moment else ""
        clauses.append(f"{ranks}{verb if number == 0 else ''} at '{shorten(end.text)}'{moment}")
    more = sum(len(end.ids) for end in ends[SHOWN:])
    return ", ".join(clauses) + (f", {words.count(more)} at other lines" if more else "")


def shorten(text: str, characters: int = LINE_CHARACTERS) -> str:
    """Return the beginning of a message, without the place in PyTorch that prints it."""
    return words.elided(TEXTS["of_source"].sub("", text) or text, characters)
