"""Pure: the ends of the files to which the ranks of a live job write -> one log for each rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hangwatch import words
from hangwatch.explain.logs import merged_logs
from hangwatch.explain.logs.merged_logs import RankLog
from hangwatch.explain.logs.rank_log import Log, clean, last_written
from hangwatch.model import LastLines, OutputEnd, RankId
from hangwatch.tables import secret_forms

LONGEST_LINE = 1024  # characters that are looked at: a rank may write 64 KiB at which patterns are slow
_SHOWN_LINES = 10
_SHOWN_CHARACTERS = 200
_LINES_MASKED = 128  # a private key of 8,192 bits has 100 lines, and the last ones do not look like a key
_OF_RANK = re.compile(r"^\[rank(\d{1,7})\]: ?")
_OF_PID = re.compile(r"^\S{1,64}:(\d{1,10}):\d{1,10} \[\d{1,3}\] ")  # NCCL's: host, pid, thread, device


def logs_of(ends: Mapping[RankId, Sequence[OutputEnd]], inner_pids: Mapping[RankId, int]) -> tuple[RankLog, ...]:
    """What each rank says; of a file that several share only the lines that tell by rank or process id whose they are.

    `inner_pids` are their processes as they number themselves.
    """
    sharing = Counter(end.file for found in ends.values() for end in found)
    read: dict[str, dict[RankId, Log]] = {}
    parts = []
    for rank, found in ends.items():
        for end in found:
            if sharing[end.file] == 1:
                parts.append((end.path, rank, _read(_lines(end))))
            elif end.file not in read:
                read[end.file] = _shared(_lines(end), ends, inner_pids)
                parts += [(end.path, of, log) for of, log in read[end.file].items()]
    return merged_logs.join(parts)


def last_lines(ends: Iterable[OutputEnd]) -> tuple[LastLines, ...]:
    """The last few lines of each file, for who reads the incident."""
    found = []
    for end in ends:
        whole = [text for line in _lines(end) if (text := clean(line).strip())][-_LINES_MASKED:]
        lines = secret_forms.mask("\n".join(whole)).split("\n")[-_SHOWN_LINES:] if whole else []
        if lines:
            path = end.path + (" (deleted)" if end.is_deleted else "")
            found.append(LastLines(path=path, lines=tuple(words.elided(line, _SHOWN_CHARACTERS) for line in lines)))
    return tuple(found)


def _lines(end: OutputEnd) -> Iterator[str]:
    """All whole lines, as a terminal would show them: the first one is cut where the file is longer than its end."""
    lines = end.text.decode("utf-8", "replace").split("\n")
    for line in lines[1:] if end.size_bytes > len(end.text) else lines:
        text = line.replace("\0", "")  # a hole of a file that was cut while somebody writes on
        yield (last_written(text) if "\r" in text else text)[:LONGEST_LINE]


def _read(lines: Iterable[str]) -> Log:
    log = Log()
    for number, line in enumerate(lines, 1):
        log.feed(line, number)
    log.end()
    return log


def _shared(lines: Iterable[str], ends: Mapping[RankId, object], inner_pids: Mapping[RankId, int]) -> dict[RankId, Log]:
    by_rank = {rank.rank: rank for rank in ends if rank.rank is not None}
    by_pid = {pid: rank for rank, pid in inner_pids.items()}
    logs: dict[RankId, Log] = {}
    for number, line in enumerate(lines, 1):
        if found := _OF_RANK.match(line):
            whose, text = by_rank.get(int(found.group(1))), line[found.end() :]
        else:
            found = _OF_PID.match(line)
            whose, text = by_pid.get(int(found.group(1))) if found else None, line
        if whose is not None:
            logs.setdefault(whose, Log()).feed(text, number)
    for log in logs.values():
        log.end()
    return logs
