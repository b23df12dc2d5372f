"""One log for each rank of a live job, from the ends of its output files. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hangwatch import words
from hangwatch.formats.torchrun_exits import FAILED
from hangwatch.logs import line_prefixes, merged_logs
from hangwatch.logs.failures import clean
from hangwatch.logs.merged_logs import RankLog
from hangwatch.logs.rank_log import Log, last_written
from hangwatch.model import LastLines, OutputEnd, RankId
from hangwatch.tables import secret_forms

# Characters that are matched: a rank may write 64 KiB in one line, where patterns are slow
LONGEST_LINE = 1024
_SHOWN_LINES = 10
_SHOWN_CHARACTERS = 200
# A private key of 8,192 bits has 100 lines; its last lines alone do not look like a key
_LINES_MASKED = 128


def read_logs(ends: Mapping[RankId, Sequence[OutputEnd]], inner_pids: Mapping[RankId, int]) -> tuple[RankLog, ...]:
    """Return the log of each rank. In a file of several ranks, only lines with a rank or process id count.

    `inner_pids` are the process ids in the pid namespaces of the ranks.
    """
    users = Counter(end.file for rank_ends in ends.values() for end in rank_ends)
    parts = []
    for rank, end in {end.file: (rank, end) for rank, rank_ends in ends.items() for end in rank_ends}.values():
        if users[end.file] == 1:
            parts.append((end.path, rank, _read_log(_read_lines(end))))
        else:
            logs = _read_shared(_read_lines(end), ends, inner_pids)
            parts += [(end.path, writer, log) for writer, log in logs.items()]
    return merged_logs.join(parts)


def last_lines(ends: Iterable[OutputEnd]) -> tuple[LastLines, ...]:
    """Return the last lines of each file for readers of the incident. Secrets of known forms are removed."""
    shown = []
    for end in ends:
        texts = [text for line in _read_lines(end) if (text := clean(line).strip())][-_LINES_MASKED:]
        if texts:
            lines = secret_forms.mask("\n".join(texts)).split("\n")[-_SHOWN_LINES:]
            path = end.path + (" (deleted)" if end.is_deleted else "")
            shown.append(LastLines(path=path, lines=tuple(words.elided(line, _SHOWN_CHARACTERS) for line in lines)))
    return tuple(shown)


def _read_lines(end: OutputEnd) -> Iterator[str]:
    """Yield the lines of the end of a file as a terminal shows them, without a first line that is incomplete."""
    lines = end.text.decode("utf-8", "replace").split("\n")
    for line in lines[1:] if end.size_bytes > len(end.text) else lines:
        text = line.replace("\0", "")  # a hole: the file was truncated while a process wrote to it
        yield (last_written(text) if "\r" in text else text)[:LONGEST_LINE]


def _read_log(lines: Iterable[str]) -> Log:
    log = Log()
    for number, line in enumerate(lines, 1):
        log.feed(line, number)
    log.end()
    return log


def _read_shared(
    lines: Iterable[str], ends: Mapping[RankId, object], inner_pids: Mapping[RankId, int]
) -> dict[RankId, Log]:
    """Return the log of each rank in a shared file. The rank or process id at the beginning of a line decides.

    Lines before torchrun's report of a failure are those of an earlier attempt if that rank now has another process.
    """
    by_rank = {rank.rank: rank for rank in ends if rank.rank is not None}
    by_pid: dict[int | None, RankId] = {pid: rank for rank, pid in inner_pids.items()}
    logs: dict[RankId, Log] = {}
    for number, line in enumerate(lines, 1):
        failed = FAILED.search(line)
        if failed and any(rank.local_rank == int(failed[2]) and pid != int(failed[3]) for pid, rank in by_pid.items()):
            logs.clear()
        mark, _, text = line_prefixes.split(line, RankId())
        writer = by_pid.get(mark.pid) if mark.rank is None else by_rank.get(mark.rank)
        if writer is not None:
            logs.setdefault(writer, Log()).feed(text, number)
    for log in logs.values():
        log.end()
    return logs
