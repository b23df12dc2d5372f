"""`hangwatch top`: the jobs of this node as they change, on a terminal that is left as it was found."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hangwatch import words
from hangwatch.cli.config_choice import config_option, settings_from
from hangwatch.cli.incident_sources import http_config_option
from hangwatch.cli.status_answer import answer_of, status_of
from hangwatch.cli.text_tables import looked
from hangwatch.cli.usage_errors import InputError
from hangwatch.model import JobState
from hangwatch.state.status import JobStatus, Status

REFRESH_SECONDS = 1.0
FIRST_SECONDS = 0.05  # until there is something to show
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAKING = (*_ENDING, signal.SIGWINCH, signal.SIGTSTP)
_SIGNALLED = 128
_GAP = 2  # columns of the screen between two of a table
_LEAST_ROOM = 40  # columns of the screen in which the beginning of a message tells something
_UNBOUNDED = 1 << 16  # columns
_PASSED = "passed"
_LOUD = {
    JobState.HUNG: "bold red",
    JobState.STALLED: "yellow",
    JobState.SUSPECTED: "yellow",
    JobState.WAITS_ELSEWHERE: "yellow",
    JobState.SUSPENDED: "yellow",
    JobState.OVER: "yellow",
    JobState.UNKNOWN: "magenta",
    JobState.ENDED: "dim",
}
_ORDER = (JobState.HUNG, JobState.STALLED, JobState.WAITS_ELSEWHERE, JobState.SUSPENDED, JobState.OVER)
_CHECK_STYLES = {"CRITICAL": "bold red", "WARNING": "yellow", "UNKNOWN": "magenta"}


class Seen(NamedTuple):
    """What the daemon said last and when, by CLOCK_MONOTONIC; and why it says nothing now."""

    status: Status | None = None
    at: float = 0.0
    problem: str | None = None


@click.command()
@config_option
@click.option("--url", help="Where the daemon serves; by default the port of the configuration on this host.")
@http_config_option("Where the daemon asks who you are")
def top(config_path: Path | None, url: str | None, http_config: Path | None) -> int:
    """The jobs of this node as they change: state, watts against the line, who moves, checks. q or Ctrl-C ends it."""
    settings, source = settings_from(config_path)
    return watch(lambda: status_of(answer_of(settings, source, url, http_config)))


def watch(ask: Callable[[], Status]) -> int:
    """Show what `ask` gives every second; the status to exit with. `ask` may raise InputError, and is asked again."""
    kind = os.environ.get("TERM", "")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or kind in ("", "dumb", "unknown"):
        raise InputError(
            f"there is no terminal to draw on (TERM={kind or 'not set'!s})\n"
            "  `hangwatch status` prints the same once; `hangwatch status --json` is for programs"
        )
    answers = _Answers(ask)
    threading.Thread(target=answers.keep_asking, name="status", daemon=True).start()
    console = Console()
    with _own_keys(), _woken_by_signals() as wake:
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with live:
            while True:
                live.update(frame(answers.seen, time.monotonic(), time.time()), refresh=True)
                number = _next(wake, REFRESH_SECONDS if answers.seen != Seen() else FIRST_SECONDS)
                if number == signal.SIGTSTP:
                    live.stop()
                    _stop_until_continued()
                    live.start()
                elif number is not None and number != signal.SIGWINCH:
                    return 0 if number == signal.SIGINT else _SIGNALLED + number


class _Answers:
    """The latest answer, asked for in a thread of its own: keys are obeyed while the daemon is silent."""

    def __init__(self, ask: Callable[[], Status]) -> None:
        self._ask = ask
        self.seen = Seen()

    def keep_asking(self) -> None:
        while True:
            try:
                self.seen = Seen(self._ask(), time.monotonic())
            except InputError as error:
                self.seen = self.seen._replace(problem=str(error).splitlines()[0])
            time.sleep(REFRESH_SECONDS)


# --- the terminal ---------------------------------------------------------------------------------------------------


@contextmanager
def _own_keys() -> Iterator[None]:
    """Each key is read as it is pressed, and not shown; afterwards the terminal is as it was."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextmanager
def _woken_by_signals() -> Iterator[int]:
    """A descriptor on which each signal is a byte: none interrupts what is being drawn, or what puts things back."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in _WAKING}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)


def _next(wake: int, wait_seconds: float) -> int | None:
    """The signal that comes within this time; q and the end of the keyboard are Ctrl-C's."""
    keys = sys.stdin.fileno()
    ready, _, _ = select.select([keys, wake], [], [], wait_seconds)
    if wake in ready:
        return os.read(wake, 1)[0]
    if keys in ready:
        typed = os.read(keys, 64)
        return signal.SIGINT if not typed or b"q" in typed.lower() else None
    return None


def _stop_until_continued() -> None:
    """Ctrl-Z: the shell has its terminal as it was, until it continues us."""
    keys = sys.stdin.fileno()
    ours = termios.tcgetattr(keys)
    ours[3] |= termios.ICANON | termios.ECHO
    termios.tcsetattr(keys, termios.TCSADRAIN, ours)
    os.kill(os.getpid(), signal.SIGSTOP)
    tty.setcbreak(keys)


# --- the picture ----------------------------------------------------------------------------------------------------


def frame(seen: Seen, now: float, unix_now: float) -> RenderableType:
    """What is shown of it; the jobs that need somebody come first. `now` is CLOCK_MONOTONIC."""
    head = Text("hangwatch top   q ends", style="dim")
    if seen.problem is not None:
        told = f"asked again every second: {words.printable(seen.problem)}"
        head = Text(told, style="bold red", no_wrap=True, overflow="ellipsis")
    if seen.status is None:
        return Group(head, Text("" if seen.problem else "asking the daemon"))
    status = seen.status
    age = f"   as of {words.duration(round(now - seen.at))} ago" if seen.problem else ""
    line = Text(words.printable(f"{status.node}   GPU sampler: {status.sampler}   incidents: {status.store}{age}"))
    return Group(head, line, _jobs(status, unix_now), _gpus(status), _checks(status, unix_now))


def _jobs(status: Status, unix_now: float) -> RenderableType:
    order = {state: place for place, state in enumerate(_ORDER)}
    jobs = sorted(status.jobs, key=lambda job: (order.get(job.state, len(order)), job.state is JobState.ENDED))
    return _Jobs(jobs, unix_now) if jobs else Text("no jobs", style="dim")


class _Jobs(NamedTuple):
    """A table of jobs. Where a line has little room for a message, each stands in a line of its own."""

    jobs: Sequence[JobStatus]
    unix_now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        messages = [_one_line(_message(job)) for job in self.jobs]
        ends = [_left(job, self.unix_now) for job in self.jobs]
        ends_of_width = ends if any(ends) else None
        unbounded = options.update(max_width=_UNBOUNDED)
        room = options.max_width - console.measure(self._table(ends_of_width, None), options=unbounded).maximum - _GAP
        if room >= min(_LEAST_ROOM, max(map(cell_len, messages))):
            yield self._table(ends_of_width, messages)
            return
        rows = console.render_lines(self._table(None, None), options, pad=False)
        yield from (*rows[0], Segment.line())
        for row, end, message in zip(rows[1:], ends, messages, strict=True):
            yield from (*row, Segment.line())
            yield _cut(f"  {_prefix(end)}{message}")

    def _table(self, ends: Sequence[str] | None, messages: Sequence[str] | None) -> Table:
        """The table with these columns, too; without messages the names of jobs and owners give way."""
        header = ("job", "owner", "state", "for", *(() if ends is None else ("ends in",)), "ranks", "watts / line")
        rows = [
            (
                f"{job.job_name} ({job.job_id})" if job.job_name not in ("", job.job_id) else job.job_id,
                job.owner,
                Text(job.state.value + (" (page)" if job.page else ""), style=_LOUD.get(job.state, "green")),
                words.duration(round(job.seconds_in_state)),
                *(() if ends is None else (ends[place],)),
                str(job.ranks),
                _watts(job),
                *(() if messages is None else (messages[place],)),
            )
            for place, job in enumerate(self.jobs)
        ]
        if messages is None:
            return _table(header, rows, ("job", "owner"))
        return _table((*header, "what"), rows, ("what",))


def _message(job: JobStatus) -> str:
    """Of a stalled job: which rank moves."""
    return job.message if job.state is JobState.STALLED else job.verdict or job.message


def _prefix(left: str) -> str:
    """When the job ends itself, before its message."""
    return "" if not left else "its time-out has passed: " if left == _PASSED else f"ends in {left}: "


def _left(job: JobStatus, unix_now: float) -> str:
    """Until its own collective time-out ends a job that hangs."""
    at = job.ends_itself_unix_seconds
    return "" if at is None else words.duration(round(at - unix_now)) if at > unix_now else _PASSED


def _watts(job: JobStatus) -> Text:
    """What the job draws against the line at or under which it is quiet."""
    if job.power_watts is None:
        return Text("")
    if job.line_watts is None:
        return Text(f"{job.power_watts:.0f} W")
    style = "yellow" if job.power_watts <= job.line_watts else ""
    return Text(f"{job.power_watts:.0f} / {job.line_watts:.0f} W", style=style)


def _gpus(status: Status) -> RenderableType:
    rows = [
        (
            str(gpu.index),
            "" if gpu.power_watts is None else f"{gpu.power_watts:.0f} W",
            "" if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}",
            ", ".join(job.job_id for job in gpu.jobs),
            gpu.fault or "",
        )
        for gpu in status.gpus
    ]
    if not rows:
        return Text("no GPUs", style="dim")
    return _table(("GPU", "power", "utilisation", "job", "fault"), rows, ("job", "fault"))


def _checks(status: Status, unix_now: float) -> RenderableType:
    """Those that are not well, and how many are."""
    rows = [
        (
            check.check,
            Text(check.status, style=_CHECK_STYLES.get(check.status, "")),
            looked(check.ran_unix_seconds, unix_now),
            check.message or check.reason,
        )
        for check in status.checks
        if check.status != "OK"
    ]
    well = Text(f"{words.count(len(status.checks) - len(rows), 'check')} OK", style="dim")
    return Group(_table(("check", "status", "looked", "what"), rows, ("what",)), well) if rows else well


def _table(header: Sequence[str], rows: Sequence[Sequence[str | Text]], shrinking: Sequence[str]) -> Table:
    """One line for each row, cut where the terminal ends: the widest of the `shrinking` columns gives way first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(_cut(name), no_wrap=name not in shrinking, overflow="ellipsis")
    for row in rows:
        table.add_row(*(_cut(_one_line(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def _cut(text: str) -> Text:
    """A text in one line also in a column that may shrink: rich shrinks none that is `no_wrap` itself."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _one_line(text: str) -> str:
    """A text of a job's owner, spelt out in one line."""
    return words.printable(" ".join(text.split()))


COMMANDS = (top,)
