"""Reader for the log of a rank: its last line with its time, and its failures. All kept texts are bounded. Pure.

The job writes its log. So a log is evidence, but never makes a rank the culprit.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import tables
from hangwatch.formats import log_times, nccl_ras
from hangwatch.formats.log_times import Moment, read_moment, remove_time
from hangwatch.limits import LONGEST_LINE
from hangwatch.logs import kernel_text, work_lines
from hangwatch.logs.failures import LIBRARY, Failure, clean, find_place, is_of_others, mask_and_cut, without_numbers
from hangwatch.model import RankId
from hangwatch.tables import launcher_lines, nccl_messages, secret_forms

MOST_FAILURES = 8  # of one rank: the first ones, and the last
MOST_TOLD = 4096  # failures of ranks in a launcher's summary
MOST_WORKS = 4096  # lines with sequence numbers of one log
_LINES_BEFORE = 8  # lines of the program before a failure, among which its steps are searched
_PATTERNS = tables.Patterns("log_lines.toml")
_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = ("Exception ignored ", "Error in atexit._run_exitfuncs:")  # an end of an interpreter, not its reason
_CHAINED = ("During handling of the above exception, ", "The above exception was the direct cause ")


class Line(NamedTuple):
    """A log line without the time at its beginning."""

    number: int
    text: str
    moment: Moment | None


class Work(NamedTuple):
    """The sequence numbers in a line of a log, the time of the line, and its line number."""

    line: work_lines.WorkLine
    moment: Moment | None
    number: int


class Message(NamedTuple):
    """The first line that matches a row of nccl_messages.toml, the value in it, and its line number."""

    value: str
    text: str
    number: int


class Log:
    """A reader for the lines of one log.

    `told_rank` is the global rank that torch wrote before its lines. `has_task_labels` is true if srun wrote the number
    of a task before the lines of the file: then it is the rank. `messages` are lines of NCCL, keyed by the row of
    nccl_messages.toml. `kernel` contains the first kernel line of each row and subject, except cleared ones.
    `is_kernel_cut` is true if there were too many. `is_kernels` is true if all lines have the shape of a kernel log.
    `processes` are the ranks in torchrun's summary and in Ray's list of workers, `ended` the line number and pid of
    each process that a launcher reported as failed; pid 0 stands for all, as they were started again. `ras` is the
    answer of NCCL's RAS. `works` are the last lines with sequence numbers of each group and kind.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.is_kernels = True
        self.is_kernel_cut = False
        self.kernel: dict[tuple[str, str], kernel_text.KernelLogLine] = {}
        self.last: Line | None = None
        self.failures: list[Failure] = []
        self.processes: set[RankId] = set()
        self.ended: list[tuple[int, int]] = []
        self.messages: dict[str, Message] = {}
        self.works: dict[tuple[object, ...], Work] = {}
        self.ras: nccl_ras.Reader | None = None
        self.told_rank: int | None = None
        self.has_task_labels = False
        self._has_tasks = False
        self._spawned = RankId()
        self._actor = RankId()  # of Ray, by the lines before the reason of its death
        self._call: tuple[object, ...] = ()
        self._in_traceback = False
        self._indent = 0
        self._where = self._heading = ""  # of a traceback: its place in the program, and the line before it
        self._began: Moment | None = None
        self._before = ""
        self._ordinary_line = (0, 0, "", "")  # its count, its number in the file, its text, its prefix
        self._before_failure: deque[str] = deque(maxlen=_LINES_BEFORE)
        self._steps: set[str] | None = None
        self._summary: dict[str, str] = {}
        self._is_root_cause = False
        self._summaries: dict[str, int] = {}  # the line number of the last one of each host

    def feed(self, line: str, number: int, before: str = "") -> None:
        """Read a line, without its prefix `before` and line end. `number` is its line number in the file."""
        self._before = before
        text = clean(line)
        if match := _PATTERNS["told_rank"].match(text):
            text, self.told_rank = text[match.end() :], int(match.group(1))
        if not text.strip():
            return
        self.lines += 1
        if (message := nccl_messages.find(text)) and message.name not in self.messages:
            self.messages[message.name] = Message(message.value, mask_and_cut(text.strip()), number)
        for work in work_lines.parse(text):
            key = work.kind, work.group, work.ranks, work.timed_out, work.is_answer
            if key in self.works or len(self.works) < MOST_WORKS:
                self.works.pop(key, None)
                self.works[key] = Work(work, self._read_moment(text), number)
                self._call = key if work.kind == "operation" else self._call
        if self._call and (caller := _PATTERNS["caller"].match(text)):
            self._read_caller(*caller.groups())
        if "world_rank=" in text and (worker := _PATTERNS["ray_worker"].search(text)):
            pid, rank, local_rank = map(int, worker.groups()[1:])
            self.processes.add(RankId(node=worker.group(1), rank=rank, local_rank=local_rank, pid=pid))
        self._read_kernel_line(text)
        if self.ras is None and nccl_ras.begins(text):
            self.ras = nccl_ras.Reader()
        is_ras = self.ras is not None and self.ras.feed(text)
        if not (is_ras or self._read_summary(text, number) or self._read_traceback(text, number)):
            self._read_ordinary(text, number)

    def _read_caller(self, function: str, file: str, line: str) -> None:
        """Keep the innermost place outside of PyTorch that called the operation."""
        work = self.works.get(self._call)
        if work is not None and not work.line.place and "/torch/" not in file:
            place = secret_forms.mask(f"{function} ({file.rpartition('/')[2]}:{line})")
            self.works[self._call] = work._replace(line=work.line._replace(place=place))

    def _read_kernel_line(self, text: str) -> None:
        heard = kernel_text.find(text)
        self.is_kernels = self.is_kernels and (heard is not None or kernel_text.has_shape(text))
        if heard is not None and len(self.kernel) < kernel_text.MOST_KEPT:
            self.kernel.setdefault((heard.matched.name, heard.matched.subject), heard)
        elif self.kernel:
            self.is_kernel_cut |= heard is not None and (heard.matched.name, heard.matched.subject) not in self.kernel
            for over in kernel_text.ended(text):
                self.kernel.pop(over, None)

    def end(self) -> None:
        """Close a summary that is still open, and set `last`. To save time, only the time of the last line is read."""
        self._end_summary(self.lines)
        self._excuse_exits()
        self._number_task()
        _, number, text, self._before = self._ordinary_line
        if text:
            moment = self._read_moment(text)
            if _PATTERNS["last_exception"].match(remove_time(text, moment)):
                self._fail(text, "", moment, number)
            self.last = Line(number, secret_forms.mask(remove_time(text, moment)), moment)

    def _excuse_exits(self) -> None:
        """Mark each exit code 1 as a failure of others, if all exceptions in the log are: they end a process so."""
        is_exit = _PATTERNS["exit_of_exception"].search
        raised = [failure for failure in self.failures if failure.rank is None and not is_exit(failure.text)]
        if all(failure.of_others for failure in raised) and any(
            LIBRARY.search(failure.text) and "elastic" not in failure.text for failure in raised
        ):
            self.failures = [
                failure._replace(of_others=failure.of_others or is_exit(failure.text) is not None)
                for failure in self.failures
            ]

    def _number_task(self) -> None:
        """Assign the first failure that srun reports to its rank, if that is the number of the task."""
        steps = [one for one in self.failures if one.text.startswith("srun: error: ") and not one.of_others]
        task = _PATTERNS["srun_task"].match(steps[0].text) if steps else None
        if task and (self.has_task_labels or (self._has_tasks and not self.processes)):
            place = self.failures.index(steps[0])
            self.failures[place] = steps[0]._replace(rank=RankId(rank=int(task.group(1))))

    def forget(self, last: int) -> None:
        """Forget the failures, messages and sequence numbers of all lines up to number `last`."""
        self.failures = [failure for failure in self.failures if failure.number > last]
        self.messages = {name: message for name, message in self.messages.items() if message.number > last}
        self.works = {key: work for key, work in self.works.items() if work.number > last}

    def _read_moment(self, text: str) -> Moment | None:
        """Return the time in a line, or else in its prefix."""
        return read_moment(text) or read_moment(self._before)

    def _read_ordinary(self, text: str, number: int) -> None:
        if text.endswith(_TRACEBACK):
            count, _, before, prefix = self._ordinary_line  # logging.exception prints a message line first
            is_message = count == self.lines - 1 and _PATTERNS["of_error"].search(before[: log_times.STAMP_WITHIN])
            self._began = self._read_moment(text) or (
                read_moment(before) or read_moment(prefix) if is_message else None
            )
            self._in_traceback, self._where = True, ""
            self._heading = before if count == self.lines - 1 else ""
            self._indent = len(text) - len(text.lstrip())
        elif _PATTERNS["restart"].search(text):
            self.ended.append((number, 0))
        elif (ended := launcher_lines.find(text)) is not None:
            self._read_end(ended, text, number)
        elif text[0] in "= " and (reason := _PATTERNS["mpich_end"].match(text)) and self.failures:
            named = self.failures[-1]
            self.failures[-1] = named._replace(text=mask_and_cut(f"{named.text}, {reason.group(1)}"))
        elif not text.startswith(_CHAINED):
            if place := _PATTERNS["ray_actor"].match(text):
                pid, node = place.groups()
                self._actor = replace(self._actor, **({"pid": int(pid)} if pid else {"node": node}))
            self._ordinary_line = self.lines, number, text, self._before
            self._before_failure.append(text)
            if self._steps is not None and _PATTERNS["step"].match(text):
                self._read_step(without_numbers(text), self._steps)

    def _read_step(self, kind: str, steps: set[str]) -> None:
        """Read a step after a failure. If there was one of this kind before, the program has gone on."""
        if kind in steps:
            self._steps = None
            self.failures = [failure._replace(has_gone_on=failure.rank is None) for failure in self.failures]
        steps.add(kind)

    def _read_end(self, ended: launcher_lines.Ended, text: str, number: int) -> None:
        moment, text = self._read_moment(text), f"exit code {ended.exit_code}" if ended.exit_code else text
        rank = self._actor if ended.rank == RankId() and "Worker exit type: " in text else ended.rank
        if ended.has_traceback:
            self._spawned = rank
        elif rank == RankId():
            self._has_tasks |= _PATTERNS["srun_tasks"].match(text) is not None
            self._fail(text, "", moment, number)
        else:
            if rank.pid is not None and rank.local_rank is not None:
                self.ended.append((number, rank.pid))
            self._add_told(rank, text.strip(), "", moment, number)

    def _add_told(self, rank: RankId, text: str, where: str, moment: Moment | None, number: int) -> None:
        if len(self.failures) < MOST_TOLD:
            self.failures.append(Failure(mask_and_cut(text), where, moment, number, is_of_others(text), rank))

    def _read_traceback(self, text: str, number: int) -> bool:
        if not self._in_traceback:
            return False
        text = text[self._indent :] if text[: self._indent].isspace() else text
        if text[0] in " \t":
            self._where = find_place(text) or self._where
            return True
        self._in_traceback = False
        if not _PATTERNS["exception"].match(text):
            return False
        if (ended := launcher_lines.find(text)) is not None and ended.rank != RankId():
            self._read_end(ended, text, number)
        elif self._spawned != RankId():
            self._add_told(self._spawned, text, self._where, self._began, number)
            self._spawned = RankId()
        elif not self._heading.startswith(_IGNORED):
            of_thread = self._heading.startswith("Exception in thread ")  # its process goes on
            self._fail(f"of a thread: {text}" if of_thread else text, self._where, self._began, number)
        return True

    def _read_summary(self, text: str, number: int) -> bool:
        """Read a line of torchrun's summary of failed ranks: `time`, `host`, `rank`, `exitcode`, `traceback`.

        Return true if the line belongs to the summary.
        """
        self._is_root_cause |= text.startswith("Root Cause ")
        if match := _PATTERNS["summary"].match(text):
            key, value = match.groups()
            if key == "time":
                self._end_summary(number)
            if key == "time" or self._summary:
                self._summary[key] = mask_and_cut(value.strip())
                return True
        if not self._summary:
            return False
        if text.startswith("  "):
            if not text.startswith("   ") and _PATTERNS["exception"].match(text.strip()):
                self._summary.setdefault("exception", mask_and_cut(text.strip()))
            elif where := find_place(text[2:]):
                self._summary["where"] = where
            return True
        self._end_summary(number)
        return re.match(r"^\[\d+\]:$|^[-=]{20,}$|^Root Cause", text) is not None

    def _end_summary(self, number: int) -> None:
        summary, self._summary = self._summary, {}
        match = _PATTERNS["summary_rank"].match(summary.get("rank", ""))
        if match is None or len(self.failures) >= MOST_TOLD or summary.keys().isdisjoint({"exitcode", "exception"}):
            return
        rank = RankId(rank=int(match.group(1)), local_rank=int(match.group(2)))
        self.failures = [
            failure
            for failure in self.failures
            if not failure.rank or failure.rank.rank is not None or failure.rank.local_rank != rank.local_rank
        ]
        exit_code = summary.get("exitcode", "")
        text = summary.get("exception") or " ".join(filter(None, ("exit code", exit_code)))
        self.failures.append(
            Failure(
                text=text,
                where=summary.get("where", ""),
                moment=read_moment(summary.get("time", "")),
                number=number,
                of_others=is_of_others(f"{text} {exit_code}"),
                rank=rank,
            )
        )
        # torchrun writes one at its end: an earlier one of this host is of an earlier job
        if self._is_root_cause:
            host, self._is_root_cause = summary.get("host", ""), False
            self.ended += [(self._summaries[host], 0)] if host in self._summaries else []
            self._summaries[host] = number
        if pid := _PATTERNS["summary_pid"].search(exit_code):
            self.processes.add(replace(rank, node=summary.get("host") or None, pid=int(pid.group(1))))

    def _fail(self, text: str, where: str, moment: Moment | None, number: int) -> None:
        own_failures = [failure for failure in self.failures if failure.rank is None]
        if len(own_failures) >= MOST_FAILURES:  # the last one may be that which ended the rank
            self.failures.remove(own_failures[-1])
        text = remove_time(text, moment)
        self._steps = {without_numbers(line) for line in self._before_failure if _PATTERNS["step"].match(line)}
        of_others = is_of_others(text) or (
            text.startswith("srun: ")
            and text.endswith((": Killed", ": Exited with exit code 1"))
            and any("CANCELLED AT" in failure.text for failure in own_failures)
        )  # Slurm ends the tasks of a cancelled step
        self.failures.append(Failure(mask_and_cut(text), where, moment, number, of_others))


def latest(lines: Sequence[Line]) -> Line | None:
    """Return the line with the latest time, on the clock of the first line with a time.

    If no line has a time, the first line. None if there are no lines.
    """
    clock = next((line.moment.clock for line in lines if line.moment), None)
    timed = [(line.moment.seconds, line) for line in lines if line.moment and line.moment.clock == clock]
    return max(timed, key=lambda entry: entry[0])[1] if timed else next(iter(lines), None)


def last_written(line: str) -> str:
    """Return what a terminal shows of a line with carriage returns. A progress bar is one such line for hours."""
    parts = [part for part in line[-LONGEST_LINE:].split("\r") if part.strip()]
    return parts[-1] if parts else ""
