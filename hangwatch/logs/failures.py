"""The failures of ranks: the text of an exception or a fatal error, and the ranks that it blames. Pure.

Failures are in logs (see `rank_log`), and in the error files of torchelastic.
"""

import contextlib
import ipaddress
import itertools
import re
from typing import NamedTuple

import msgspec

from hangwatch import tables
from hangwatch.formats import decoding, pyspy_json
from hangwatch.formats.log_times import Moment, at_unix_seconds
from hangwatch.model import RankId
from hangwatch.tables import secret_forms

LONGEST_TEXT = 400
LONGEST_LOG_LINE = 4096
"""Number of characters of a log line, after its prefix, that are matched. Patterns take quadratic time."""
LARGEST_ERROR_FILE = 1 << 20
TEXTS = tables.Patterns("failure_texts.toml")
LIBRARY = re.compile(r"\bNCCL\b|gloo|c10d|TCPStore|tensorpipe|torch[./]distributed|Dist\w+Error", re.IGNORECASE)
NUMBER = re.compile(r"0x[0-9a-fA-F]{1,16}|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class Failure(NamedTuple):
    """An exception or another fatal error. `where` is the line of the program. `rank` is set if the text names a rank.

    `text` contains no secrets of known forms. `of_others` is true if the failure reports a lost or silent rank, so that
    it follows a failure or hang of another rank. `exception` is the type of the exception, "" if there is none.
    `has_gone_on` is true if the program wrote the next steps after it.
    """

    text: str
    where: str
    moment: Moment | None
    number: int
    of_others: bool
    rank: RankId | None = None
    exception: str = ""
    has_gone_on: bool = False


def without_numbers(text: str) -> str:
    """Return the text with "#" instead of each number, so that lines of one kind are equal."""
    return NUMBER.sub("#", text)


def mask_and_cut(text: str) -> str:
    """Return a text without secrets of known forms and of limited length."""
    return secret_forms.mask(text)[:LONGEST_TEXT]


def is_of_others(text: str) -> bool:
    """True if the beginning of a text reports a lost or silent rank of the job, not an endpoint outside of it."""
    text = text[:LONGEST_TEXT]
    is_lost = TEXTS["of_others"].search(text) or (TEXTS["lost"].search(text) and TEXTS["in_the_job"].search(text))
    return is_lost is not None and (LIBRARY.search(text) is not None or not _names_the_internet(text))


def is_unanswered(text: str) -> bool:
    """True if a text reports a lost connection or a wait, and does not tell whether its other end is in the job."""
    return TEXTS["unanswered"].search(text) is not None and not _names_the_internet(text)


def _names_the_internet(text: str) -> bool:
    """True if a text contains a web endpoint or a public address."""
    return TEXTS["outside"].search(text) is not None or any(
        _is_public(match.group(1) or match.group()) for match in TEXTS["address"].finditer(text)
    )


def _is_public(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_global
    return False


def blames_another(failure: Failure, rank: int | None, *, is_timed_out: bool = False) -> bool:
    """True if a failure of this rank reports a lost connection or names another rank.

    If `is_timed_out` is true, a report without exit code or signal counts, too: PyTorch's watchdog may have ended the
    process.
    """
    numbers = (match.group(match.lastindex or 0) for match in TEXTS["of_another"].finditer(failure.text))
    is_of_watchdog = is_timed_out and TEXTS["untold_end"].search(failure.text) is not None
    return failure.of_others or is_of_watchdog or any(int(number) != rank for number in numbers)


def clean(line: str) -> str:
    """Return a log line without colours and control characters."""
    return TEXTS["escapes"].sub("", line[:LONGEST_LOG_LINE]).rstrip()


class _Extra(msgspec.Struct):
    py_callstack: str = ""
    timestamp: str | int | float | None = None


class _Message(msgspec.Struct):
    message: str = ""
    extraInfo: _Extra = msgspec.field(default_factory=_Extra)  # noqa: N815 - torchelastic's word


class _ErrorFile(msgspec.Struct):
    message: _Message | str


_ERROR_FILE = decoding.decoder(_ErrorFile)


def is_error_file(first_line: str) -> bool:
    """True if a file begins like torchelastic's error.json."""
    return re.match(r'^\s*\{\s*"message"\s*:', first_line) is not None


def parse_error_file(text: str) -> Failure:
    """Return the failure in the error file of a rank (torch.distributed.elastic, error_handler.py: record_exception).

    Its `timestamp` is in whole seconds since 1970. Raises ValueError for another file.
    """
    if len(text) > LARGEST_ERROR_FILE:
        raise ValueError(f"is larger than {LARGEST_ERROR_FILE >> 20} MiB: not an error.json of torchelastic")
    try:
        content = _ERROR_FILE.decode(text).message
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"is not an error.json of torchelastic: {error}") from None
    message = _Message(message=content) if isinstance(content, str) else content
    where = _find_raising_place(message.extraInfo.py_callstack, message.message)
    first_line = clean(message.message.partition("\n")[0])
    text, of_others = mask_and_cut(first_line), is_of_others(first_line)
    exception = None if isinstance(content, str) else TEXTS["exception_type"].match(text)
    moment = at_unix_seconds(message.extraInfo.timestamp)
    return Failure(text, where, moment, 1, of_others, exception=exception.group(1) if exception else "")


def _find_raising_place(callstack: str, message: str) -> str:
    """Return the innermost place in the program at which an exception was raised; "" if the call stack shows none.

    `message` is "Type: text", as record_exception writes it. In the call stack, this text follows the module's name.
    Lines of the text, and of exceptions that caused it, can look like a traceback and contain anything, so only the
    traceback just before it counts.
    """
    text = message.removesuffix(": ")
    before = callstack.removesuffix("\n").removesuffix(text)
    if not callstack.startswith(f"{before}{text}"):  # notes follow
        before = callstack[: max(callstack.find(text), 0)]
    lines = before.split("\n")
    if re.fullmatch(r"[\w.<>]{0,1000}", lines.pop()) is None:
        return ""
    frames = itertools.takewhile(lambda line: line.startswith("  "), reversed(lines))
    return next(filter(None, map(find_place, frames)), "")


def find_place(line: str) -> str:
    """Return the place that a line of a traceback contains, if it is in the program; "" for other lines."""
    found = TEXTS["code"].match(line)
    if found is None or pyspy_json.is_installed(found.group(1)):
        return ""
    place = f"{found.group(3)} ({found.group(1).rpartition('/')[2]}:{found.group(2)})"
    return place if secret_forms.mask(place) == place else ""
