"""`hangwatch top`: a live view of the jobs on this node. The terminal is restored at the end."""

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
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hangwatch import words
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option, url_option
from hangwatch.cli.text_tables import engine_text
from hangwatch.cli.usage_errors import InputError
from hangwatch.errors import UserError
from hangwatch.model import JobState
from hangwatch.state.status import GpuStatus, JobStatus, Status
from hangwatch.tools.commands.job_descriptions import (
    describe_silence,
    describe_state,
    describe_straggler,
    shown_seconds,
)
from hangwatch.tools.commands.status_client import decode_status, fetch_status

REFRESH_SECONDS = 1.0
_LAST_REQUEST_SECONDS = 0.5
FIRST_SECONDS = 0.05  # interval of updates until the first answer
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAKING = (*_ENDING, signal.SIGWINCH, signal.SIGTSTP)
_SIGNALLED = 128
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


class LastAnswer(NamedTuple):
    """The last status from the daemon. `status` is None before the first one.

    `at` is the time when it arrived (CLOCK_MONOTONIC). `problem` is the error of the last request; None if it
    succeeded.
    """

    status: Status | None = None
    at: float = 0.0
    problem: str | None = None


@click.command()
@config_option
@url_option
def top(config_path: Path | None, url: str | None) -> int:
    """Show jobs, GPUs and checks live; q or Ctrl-C quits.

    For each job it shows the state, the power and the limit below which the job is quiet, and the verdict.
    """
    settings, source = settings_from(config_path)
    return watch(lambda: decode_status(fetch_status(settings, source, url)))


def watch(ask: Callable[[], Status]) -> int:
    """Call `ask` and show the returned status every second until the user quits. Return the exit code.

    If `ask` raises UserError, show the error and continue. Raises InputError if there is no suitable terminal.
    """
    terminal = os.environ.get("TERM") or "not set"
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_terminal or terminal in ("not set", "dumb", "unknown"):
        raise InputError(
            f"a terminal is needed ({f'TERM={terminal}' if is_terminal else 'input or output is a pipe or file'})\n"
            "  `hangwatch status` prints the same tables once; `hangwatch status --json` is for programs"
        )
    answers = _Answers(ask)
    console = Console()
    with answers.keep_fresh(), _unbuffered_keys(), _woken_by_signals() as wake:
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with live:
            while True:
                live.update(frame(answers.seen, time.monotonic(), time.time()), refresh=True)
                number = _next_signal(wake, REFRESH_SECONDS if answers.seen != LastAnswer() else FIRST_SECONDS)
                if number == signal.SIGTSTP:
                    live.stop()
                    _suspend()
                    live.start()
                elif number is not None and number != signal.SIGWINCH:
                    return 0 if number == signal.SIGINT else _SIGNALLED + number


class _Answers:
    """The last status from the daemon. A separate thread fetches it, so keys work while the daemon does not respond."""

    def __init__(self, ask: Callable[[], Status]) -> None:
        self._ask = ask
        self.seen = LastAnswer()
        self._is_over = threading.Event()

    @contextmanager
    def keep_fresh(self) -> Iterator[None]:
        """Fetch the status every second within the block.

        At the end, a request in progress has a moment: a thread that runs while Python ends may crash it.
        """
        thread = threading.Thread(target=self._keep_asking, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join(_LAST_REQUEST_SECONDS)

    def _keep_asking(self) -> None:
        while not self._is_over.is_set():
            try:
                self.seen = LastAnswer(self._ask(), time.monotonic())
            except UserError as error:
                self.seen = self.seen._replace(problem=str(error))
            self._is_over.wait(REFRESH_SECONDS)


# --- the terminal ---------------------------------------------------------------------------------------------------


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Let the terminal deliver each key at once and without echo. Restore the terminal afterwards."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextmanager
def _woken_by_signals() -> Iterator[int]:
    """Yield a descriptor from which one byte can be read for each signal.

    Within the block, signals have no other effect, so they do not interrupt drawing or restoring the terminal.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in _WAKING}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)


def _next_signal(wake: int, wait_seconds: float) -> int | None:
    """Wait at most `wait_seconds` for a signal and return its number; None if there was no signal.

    The key q and the end of input count as SIGINT.
    """
    keys = sys.stdin.fileno()
    ready, _, _ = select.select([keys, wake], [], [], wait_seconds)
    if wake in ready:
        return os.read(wake, 1)[0]
    if keys in ready:
        typed = os.read(keys, 64)
        return signal.SIGINT if not typed or b"q" in typed.lower() else None
    return None


def _suspend() -> None:
    """Stop this process, as Ctrl-Z does. Restore the terminal before, and set it up again after the stop."""
    keys = sys.stdin.fileno()
    attributes = termios.tcgetattr(keys)
    attributes[3] |= termios.ICANON | termios.ECHO
    termios.tcsetattr(keys, termios.TCSADRAIN, attributes)
    os.kill(os.getpid(), signal.SIGSTOP)
    tty.setcbreak(keys)


# --- the picture ----------------------------------------------------------------------------------------------------


def frame(seen: LastAnswer, now: float, unix_now: float) -> RenderableType:
    """Return the status as it is drawn, with jobs that need an operator first. `now` is CLOCK_MONOTONIC."""
    head = Text("hangwatch top   q quits", style="dim")
    problem, *advice = (seen.problem or "").splitlines() or [""]
    if problem:
        problem = f"retrying every second: {words.printable(problem)}"
        head = Text(problem, style="bold red", no_wrap=True, overflow="ellipsis")
    if seen.status is None:
        return Group(
            head, *(Text(words.printable(line)) for line in advice or ["" if problem else "waiting for the daemon"])
        )
    status = seen.status
    age = f"   as of {words.duration(round(now - seen.at))} ago" if seen.problem else ""
    line = Text(words.printable(f"{status.node}   GPU sampler: {status.sampler}   incidents: {status.store}{age}"))
    engines = (_cut(engine_text(engine)) for engine in status.engines)
    order = {state: place for place, state in enumerate(_ORDER)}
    ordered = sorted(status.jobs, key=lambda job: (order.get(job.state, len(order)), job.state is JobState.ENDED))
    jobs = _Jobs(ordered, unix_now) if ordered else Text("no jobs", style="dim")
    return Group(head, line, jobs, *engines, _gpus(status), _checks(status, unix_now))


class _Jobs(NamedTuple):
    """A table of jobs, with the verdict of each job on the line below it. Only verdicts and names are cut."""

    jobs: Sequence[JobStatus]
    unix_now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, *rows = console.render_lines(self._table(), options, pad=False)
        yield from (*head, Segment.line())
        for row, job in zip(rows, self.jobs, strict=True):
            yield from (*row, Segment.line())
            yield _cut(f"  {_describe_timeout(job, self.unix_now)}{_one_line(_message(job))}")

    def _table(self) -> Table:
        rows = [
            (
                f"{job.job_name} ({job.job_id})" if job.job_name not in ("", job.job_id) else job.job_id,
                job.owner,
                Text(describe_state(job), style=_LOUD.get(job.state, "green")),
                words.duration(round(shown_seconds(job))),
                str(job.ranks),
                _watts(job),
                "" if job.collectives_per_second is None else f"{job.collectives_per_second:.3g}/s",
            )
            for job in self.jobs
        ]
        heads = ("job", "owner", "state", "for", "ranks", "power / quiet", "collectives")
        shown = len(heads) if any(row[-1] for row in rows) else len(heads) - 1
        return _table(heads[:shown], [row[:shown] for row in rows], ("job", "owner"))


def _message(job: JobStatus) -> str:
    """Return the silence of a job, its late rank and the verdict on it, else the detector's message.

    For a stalled job, return the detector's message, because it names the ranks that progress.
    """
    message = job.message if job.state is JobState.STALLED else job.verdict or job.message
    return "; ".join(filter(None, (describe_silence(job), describe_straggler(job), message)))


def _describe_timeout(job: JobStatus, unix_now: float) -> str:
    """Return the text before a message that says when the collective timeout ends the job; "" if not known."""
    at = job.ends_itself_unix_seconds
    if at is None:
        return ""
    return f"times out in {words.duration(round(at - unix_now))}: " if at > unix_now else "its timeout has passed: "


def _watts(job: JobStatus) -> Text:
    """Return the power of the job and its low-power threshold in watts, as text."""
    if job.power_watts is None:
        return Text("")
    if job.line_watts is None:
        return Text(f"{job.power_watts:.0f} W")
    style = "yellow" if job.power_watts <= job.line_watts else ""
    return Text(f"{job.power_watts:.0f} / {job.line_watts:.0f} W", style=style)


def _gpus(status: Status) -> RenderableType:
    """Return a table of the GPUs. Columns without any value are left out."""
    columns = {
        "GPU": [str(gpu.index) for gpu in status.gpus],
        "power": ["" if gpu.power_watts is None else f"{gpu.power_watts:.0f} W" for gpu in status.gpus],
        "memory": [_memory(gpu) for gpu in status.gpus],
        "temp": ["" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C" for gpu in status.gpus],
        "utilisation": ["" if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}" for gpu in status.gpus],
        "job": [", ".join(job.job_id for job in gpu.jobs) for gpu in status.gpus],
        "fault": [gpu.fault or "" for gpu in status.gpus],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    if not shown:
        return Text("no GPUs", style="dim")
    return _table(tuple(shown), list(zip(*shown.values(), strict=True)), ("job", "fault"))


def _memory(gpu: GpuStatus) -> str:
    """Return the used and the whole memory of a GPU in GiB; "" if it was not read."""
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return ""
    return f"{gpu.memory_used_bytes / (1 << 30):.0f} / {gpu.memory_total_bytes / (1 << 30):.0f} GiB"


def _checks(status: Status, unix_now: float) -> RenderableType:
    """Return a table of the checks that are not OK, with the number of the other checks below it."""
    rows = [
        (
            check.check,
            Text(check.status, style=_CHECK_STYLES.get(check.status, "")),
            words.ago(unix_now - check.ran_unix_seconds),
            check.message or check.reason,
        )
        for check in status.checks
        if check.status != "OK"
    ]
    well = Text(f"{words.count(len(status.checks) - len(rows), 'check')} OK", style="dim")
    return Group(_table(("check", "status", "ran", "what"), rows, ("what",)), well) if rows else well


def _table(header: Sequence[str], rows: Sequence[Sequence[str | Text]], shrinking: Sequence[str]) -> Table:
    """Return a table with one line per row. In a narrow terminal, the widest `shrinking` column is cut first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(_cut(name), no_wrap=name not in shrinking, overflow="ellipsis")
    for row in rows:
        table.add_row(*(_cut(_one_line(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def _cut(text: str) -> Text:
    """Return text that rich cuts instead of wrapping. A column that is `no_wrap` itself would not be cut."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _one_line(text: str) -> str:
    """Return the text as one printable line, because the owner of a job may have written it."""
    return words.printable(" ".join(text.split()))


COMMANDS = (top,)
