"""Text forms of values, the same in verdicts, reports and pages: counts, times, ranks, nodes, foreign text. Pure."""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence, Sized
from datetime import datetime, timezone

from hangwatch.model import Job, RankId, Sleep, list_by_key

_NODES_LISTED = 3
_LONGEST_FOLDED = 80  # characters of a list of ranks in a sentence
_JOB_CHARACTERS = 64
_KEY_CHARACTERS = 8
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_CHARACTERS = 48
PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible (D)",
    "T": "stopped (T)",
    "t": "traced (t)",
    "Z": "zombie (Z)",
    "I": "idle kernel",
    "X": "dead (X)",
}


def printable(text: str) -> str:
    """Return the text with escapes for characters, such as line ends, that could control a terminal or browser."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def elided(text: str, characters: int) -> str:
    """Return the printable text, cut to at most `characters` characters."""
    text = printable(text)
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def cut_middle(text: str, characters: int) -> str:
    """Return printable text of at most `characters` characters, cut in the middle: a path keeps its file."""
    text, half = printable(text), (characters - 1) // 2
    return text if len(text) <= characters else f"{text[: characters - 1 - half]}…{text[-half:]}"


def plain_word(text: str) -> str:
    """Return a foreign name as one word of at most 48 characters that is safe in Markdown, HTML, a shell and PromQL."""
    return _NOT_PLAIN.sub("_", text[: 4 * _NAME_CHARACTERS]).strip("._-")[:_NAME_CHARACTERS]


def checksum(content: bytes, size: int = 8) -> str:
    """Return `size` bytes of BLAKE2b, in hex. No value with a given checksum can be made on purpose."""
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def describe_job(job: Job) -> str:
    """Return a job as text for a page: `llama-70b of user ada (Slurm job 4711, train.py)`.

    The names that the user chose come first, then the owner that the kernel reports. The job id is left out if the
    name of the owner contains it.
    """
    name, user = plain_word(job.job_name), plain_word(job.user or "")
    number = job.owner.removeprefix("Slurm job ")
    owner = f"Slurm job {job.job_id}" if job.job_id.partition(".")[0] == number else job.owner
    is_told = not name or owner.endswith(job.job_id)
    of = f" of user {user}" if user and job.user != job.owner else ""
    if job.uid is not None and job.user == f"uid {job.uid}" != job.owner:  # the user has no name
        of = f" of {job.user}"
    places = ", ".join(filter(None, ("" if is_told else job.job_id, owner, plain_word(job.program))))
    return f"{name or job.job_id}{of}" + (f" ({places})" if places else "")


def utc(unix_seconds: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Return a Unix time in UTC, in the form of strftime(3). A time outside the calendar is shown as a number."""
    try:
        return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:g} s"


def incident_name(job: Job, opened_unix_seconds: float) -> str:
    """Return `<UTC time>-<job>-<key>`, which is safe as a folder name and has at most 90 characters.

    Two owners can have jobs of one name that hang in the same second: the first characters of the key distinguish
    them. Very old incidents have no key. A job id that was changed or cut gets a hash. Raises ValueError for a time
    outside the calendar.
    """
    job_id, key = job.job_id, re.sub(r"[^0-9a-z]+", "", job.job_key)[:_KEY_CHARACTERS]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", job_id)[:_JOB_CHARACTERS]
    if not safe or safe != job_id:
        mark = hashlib.sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        safe = f"{safe[: _JOB_CHARACTERS - 9]}-{mark}"
    try:
        when = datetime.fromtimestamp(int(opened_unix_seconds), timezone.utc)
    except (OverflowError, OSError) as error:
        raise ValueError(str(error)) from None
    return "-".join(filter(None, (f"{when:%Y%m%dT%H%M%SZ}", safe, key)))


def duration(seconds: float) -> str:
    """Return a duration in at most two units: `4.2 s`, `3 min 05 s`, `2 h 03 min`, `4 d 02 h`."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 24 else f"{hours // 24} d {hours % 24:02} h"


def short_duration(seconds: float) -> str:
    """Return a duration that may be below a second: `4.2 ms`, else as `duration`."""
    return duration(seconds) if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def describe_sleep(sleep: Sleep) -> str:
    """Return a sleep as text: "sleeps until 15:24:10 UTC", or "polls every 30 s ..." for a rank that polls.

    The text has the date if the sleep ends after more than a day.
    """
    if sleep.is_polling:
        return f"polls every {duration(max(sleep.seconds, 0.1))} for something that does not happen"
    date = "%Y-%m-%d " if sleep.seconds > 86_400 else ""
    return f"sleeps until {utc(sleep.until_unix_seconds, f'{date}%H:%M:%S UTC')}"


def ago(seconds: float) -> str:
    """Return the age of an event in one unit: `12 s ago`, `3 min ago`, `5 h ago`."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def sentence(text: str) -> str:
    """Return the text with a capital first letter, except after a process title, such as VLLM::Worker."""
    return text if re.match(r"\S*[_:\d]\S", text) else text[:1].upper() + text[1:]


def count(number: int, noun: str = "rank") -> str:
    """Return a number with its noun: `1 rank`, `16,384 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def agree(things: Sized, singular: str, plural: str) -> str:
    """Return the word that agrees with the number of things: "has" for one rank, "have" for two."""
    return singular if len(things) == 1 else plural


def join_words(words: Sequence[str]) -> str:
    """Return the words as an enumeration: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def place(host: str, port: int) -> str:
    """Return an address and a port as in a URL: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fold(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: "0-2,5" for 0, 1, 2, 5. Empty if there are no numbers."""
    known = set(numbers)
    firsts = sorted(number for number in known if number - 1 not in known)
    lasts = sorted(number for number in known if number + 1 not in known)
    return _fold_ends(zip(firsts, lasts, strict=True))


def unfold(text: str) -> tuple[int, ...] | None:
    """Return the numbers in a list such as "0-3,6"; None if the text is not such a list or has a number above 9,999."""
    from ClusterShell.RangeSet import RangeSet, RangeSetParseError

    if re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", text) is None:
        return None
    try:
        return tuple(RangeSet(text).intiter())
    except RangeSetParseError:
        return None


def fold_ranges(ranges: Iterable[range]) -> str:
    """Return ranges as `fold` does, without listing the numbers: range(0, 3) and range(5, 6) are "0-2,5"."""
    return _fold_ends((numbers.start, numbers.stop - 1) for numbers in ranges)


def _fold_ends(ends: Iterable[tuple[int, int]]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def count_ranges(ranges: Iterable[range]) -> str:
    """Return the number of ranks in these ranges: "5 ranks". Large ranges cost no more than small ones."""
    return count(sum(numbers.stop - numbers.start for numbers in ranges), "rank")


def fold_nodes(nodes: Iterable[str]) -> str:
    """Return node names as a set: "node[1-3]" for node1, node2, node3. Unusual names are listed after the set.

    Unusual names are not passed to ClusterShell. For example, it could read "a[0-999999999]" as a billion nodes, or
    a name as a group for which it runs a program.
    """
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    names = sorted({printable(name) for name in nodes})
    plain = [name for name in names if _PLAIN_NAME.fullmatch(name)]
    try:
        folded = str(NodeSet.fromlist(plain, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        folded = ",".join(plain)
    return ",".join(filter(None, (folded, *(name for name in names if not _PLAIN_NAME.fullmatch(name)))))


def fold_ids(ids: Iterable[RankId]) -> str:
    """Return ranks as text for a table cell: `0-6,8-511`; "?" if there are none.

    Ranks without a global rank are listed by node, with their local ranks, else their pids.
    """
    ids = list(ids)
    if len(ids) == 1 and ids[0].title and ids[0].rank is None:
        return _name_rank(ids[0])
    numbered = [rank.rank for rank in ids if rank.rank is not None]
    by_node = list_by_key((rank.node or "", rank) for rank in ids if rank.rank is None)
    parts = [fold(numbered)] if numbered else []
    for node, ranks in by_node.items():
        local = [rank.local_rank for rank in ranks if rank.local_rank is not None]
        pids = [rank.pid for rank in ranks if rank.local_rank is None and rank.pid is not None]
        place = f"{printable(node)} " if node else ""
        parts += [f"{place}local {fold(local)}"] if local else []
        parts += [f"{place}pid {fold(pids)}"] if pids else []
    return "; ".join(parts) or "?"


def fold_titles(ids: Sequence[RankId]) -> str:
    """Return processes with titles that differ by one number: `VLLM::Worker_TP0-1,3 (pid 4120-4121,4123)`.

    Without such titles, or with processes of several nodes, return the same as `fold_ids`.
    """
    titles = [title for rank in ids if (title := re.fullmatch(r"(.*?)([0-9]{1,7})", rank.title or ""))]
    names, nodes = {title.group(1) for title in titles}, {rank.node for rank in ids}
    if len(titles) < len(ids) or len(names) != 1 or len(nodes) != 1:
        return fold_ids(ids)
    pids = [rank.pid for rank in ids if rank.pid is not None]
    numbers = fold(int(title.group(2)) for title in titles)
    return f"{printable(names.pop())}{numbers}" + (f" (pid {fold(pids)})" if pids else "")


def name_ranks(ranks: Sequence[RankId]) -> str:
    """Return ranks as text for a sentence: `rank 7 (gpu-a12, local rank 7, pid 4711)`, or `ranks 0-6 on a and b`."""
    if len(ranks) == 1:
        return _name_rank(ranks[0])
    return f"{_folded(ranks)}{_places(ranks)}"


def traced_ranks(traced: Sequence[tuple[RankId, str]]) -> str:
    """Return up to four ranks and the process that has stopped each: `rank 3 on a is stopped by gdb, pid 4711`."""
    return "; ".join(f"{_name_rank(rank)} is stopped by {tracer}" for rank, tracer in traced[:4])


def _name_rank(rank: RankId) -> str:
    """Return one rank as text: its name, then its other numbers in parentheses.

    The name is the process title, else the global rank, else the local rank, else the pid. A number at the end of
    the title is not repeated.
    """
    numbers = (("rank", rank.rank), ("local rank", rank.local_rank), ("pid", rank.pid))
    ending = re.search(r"\d+$", rank.title or "")
    shown = [
        f"{kind} {number}"
        for kind, number in numbers
        if number is not None and not (ending and kind != "pid" and number == int(ending.group()))
    ]
    name, *rest = [*([printable(rank.title)] if rank.title else []), *shown] or ["a rank"]
    parts = [printable(rank.node), *rest] if rank.node else rest
    return f"{name} ({', '.join(parts)})" if parts else name


def _folded(ranks: Sequence[RankId]) -> str:
    """Return several ranks as text. A long list follows the number of ranks, and is cut."""
    known = {
        "ranks": [rank.rank for rank in ranks],
        "local ranks": [rank.local_rank for rank in ranks],
        "pids": [rank.pid for rank in ranks],
    }
    kind = next((kind for kind, numbers in known.items() if None not in numbers), "pids")
    folded = fold(number for number in known[kind] if number is not None)
    if kind != "pids" and len(folded) <= _LONGEST_FOLDED:
        return f"{kind} {folded}"
    return count(len(ranks)) + (f" ({kind} {elided(folded, _LONGEST_FOLDED)})" if folded else "")


def _places(ranks: Sequence[RankId]) -> str:
    nodes = sorted({printable(rank.node) for rank in ranks if rank.node})
    if not nodes:
        return ""
    return f" on {join_words(nodes)}" if len(nodes) <= _NODES_LISTED else f" on {count(len(nodes), 'node')}"


def holds_any(line: str, texts: tuple[str, ...]) -> bool:
    """True if a line contains one of the texts: a test that is many times faster than a pattern."""
    for text in texts:  # noqa: SIM110 - any() takes twice the time, for each line of large logs
        if text in line:
            return True
    return False
