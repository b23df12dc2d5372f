"""The report of an incident as text, for a terminal, a mail or grep. The verdict comes first, raw stacks come last."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partialmethod
from types import MappingProxyType

from msgspec import structs

from hangwatch import words
from hangwatch.model import Capture, Feedback, Frame, Group, Grouping, Incident, Value, Verdict
from hangwatch.report import phrases, sparklines
from hangwatch.report.dump_text import raw_lines
from hangwatch.stacks.user_code import innermost_user_frame
from hangwatch.verdict import environment_diff
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.next_steps import describe_action, next_step
from hangwatch.words import printable

_MAX_GROUPS = 40
_FOLD_CHARACTERS = 60
_SHORT_LINES = 30
_SHORT_GROUPS = 8
_SHORT_FRAMES = 4
_INNER_FRAMES = 5  # of a folded stack, as in page.html.j2
_OUTER_FRAMES = 4
_LEAST_FOLDED = 4
_ONLY_IN_FULL = frozenset({"Named", "Check first", "State", "Taken", "Command", "Incident"})
_ABOUT_JOB = frozenset({"Verdict", "Named", "Job", "Ranks", "Not captured", "Not in the input"})
"""Rows that say nothing about a process that was dumped alone."""
_SHOWN_BY_GROUPS = frozenset({"activity", "group", "thread", "workers"})
"""Kinds of evidence that only repeat a stack of the groups above it."""
_SOURCE_CHARACTERS = 40  # of a source line at least


class _Style(Value, frozen=True):
    """The layout of lines: colours, width, the highlighted places of the user's code, and known source lines."""

    color: bool
    width: int
    user_places: frozenset[tuple[str, str]] = frozenset()
    source_lines: Mapping[Frame, str] = MappingProxyType({})

    def _painted(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color else text

    strong = partialmethod(_painted, "1")
    bad = partialmethod(_painted, "1;31")
    doubtful = partialmethod(_painted, "1;33")
    good = partialmethod(_painted, "1;32")
    odd = partialmethod(_painted, "1;35")
    faint = partialmethod(_painted, "2")

    def frame(self, frame: Frame) -> str:
        """Return the frame as text. Frames of the user's code are highlighted."""
        text = printable(str(frame))
        if not self.user_places:
            return text
        return self.strong(text) if frame.place in self.user_places else self.faint(text)

    def wrapped(self, text: str, indent: str = "") -> list[str]:
        width = max(self.width, len(indent) + 20)
        return textwrap.wrap(printable(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]

    def wrap_all(self, texts: Iterable[str], indent: int) -> list[str]:
        """Return the lines of all texts. The further lines of each begin with `indent` spaces."""
        return [line for text in texts for line in self.wrapped(text, " " * indent)]


def render(incident: Incident, feedback: Feedback | None = None, *, color: bool = False, width: int = 110) -> str:
    """Return the whole report: verdict, groups, evidence, power, timeline, host, and all raw stacks.

    `color` adds ANSI escapes. All lines wrap at `width`, except frames. Only the stacks at the end are in py-spy's text
    format, with the prefix `[host:rank]`, so `hangwatch explain report.txt` can read them.
    """
    style = _style(incident.grouping, color, width)
    about = "" if feedback is None else phrases.describe_feedback(feedback, incident.verdict)
    rows = [("Feedback", about), *_heading(incident)]
    lines = _verdict_lines(phrases.past_verdict(incident), style) + _table(rows, style)
    lines += _grouping_lines(incident.grouping, incident.verdict, style)
    lines += _rank_sections(incident, style)
    progress, power = sparklines.draw_progress(incident, width), sparklines.draw_power(incident, width)
    lines += _section("Progress", style.wrap_all(progress, sparklines.INDENT), style)
    lines += _section("Power", style.wrap_all(power, sparklines.INDENT), style)
    timeline = (f"{words.utc(step.unix_seconds)}  {step.state.value:<9}  {step.message}" for step in incident.timeline)
    lines += _section("Timeline", style.wrap_all(timeline, 36), style)
    lines += _section("Host", _table(incident.host_facts, style), style)
    taken = [capture for capture in incident.captures if capture.rounds]
    lines += _section("Captures", _capture_lines(taken, style), style)
    return "\n".join([*lines, *_stack_section(incident, style)]) + "\n"


def render_answer(
    incident: Incident,
    *,
    color: bool = False,
    width: int = 110,
    full: bool = False,
    stacks: bool = False,
    source_lines: Mapping[Frame, str] = MappingProxyType({}),
) -> str:
    """Return the answer of a dump: verdict, what the job is stuck on, the first step, and the groups.

    At most 30 lines of 110 characters for a job of up to 8 groups. `full` adds the stacks of all groups, evidence and
    details of ranks, `stacks` all raw stacks. It has no incident name, because the incident of a dump is not stored.
    The text of `source_lines` is printed beside its frame.
    """
    style = structs.replace(_style(incident.grouping, color, width), source_lines=source_lines)
    hidden = {"Incident"} if full else _ONLY_IN_FULL
    if incident.job.launcher == "pids" and len(incident.grouping.members) == 1:
        hidden |= _ABOUT_JOB
    rows = [row for row in _heading(incident) if row[0] not in hidden]
    rows.sort(key=lambda row: full or row[0] not in {"Stuck on", "Do first", "Its log"})
    if full:
        lines = _verdict_lines(incident.verdict, style) + _table(rows, style)
        lines += _grouping_lines(incident.grouping, incident.verdict, style)
        lines += _rank_sections(incident, style)
    else:
        lines = [*_message_lines(incident.verdict, style), "", *_table(rows, style)]
        lines += _short_group_lines(incident.grouping, incident.verdict, style, _SHORT_LINES - len(lines))
    return "\n".join([*lines, *(_stack_section(incident, style) if stacks else ())]) + "\n"


def render_verdict(grouping: Grouping, verdict: Verdict, *, color: bool = False, width: int = 110) -> str:
    """Return the verdict, groups and evidence of dumps that belong to no incident."""
    style = _style(grouping, color, width)
    rows = [
        ("Verdict", phrases.judgement(verdict)),
        *_suspect_rows(verdict),
        *_ranks_rows(grouping),
        ("Without", phrases.without(grouping)),
    ]
    if len(grouping.members) == 1 and grouping.world_size is None:
        rows = [row for row in rows if row[0] not in _ABOUT_JOB]
    lines = _verdict_lines(verdict, style) + _table(rows, style) + _grouping_lines(grouping, verdict, style)
    return "\n".join(lines) + "\n"


def _style(grouping: Grouping, color: bool, width: int) -> _Style:
    user_places = phrases.own_places(grouping.groups) if color else frozenset()
    return _Style(color=color, width=width, user_places=user_places)


def _rank_sections(incident: Incident, style: _Style) -> list[str]:
    """Return the sections about single ranks: process details, environment and last log lines."""
    lines = _section("Process details", _detail_lines(incident, style), style)
    environment = incident.captures[-1].environment if incident.captures else None
    differences = map(environment_diff.describe_difference, environment.differences if environment else ())
    lines += _section("Environment, where it differs", style.wrap_all(differences, 4), style)
    return lines + _section("Last log lines", _log_lines(incident), style)


def _stack_section(incident: Incident, style: _Style) -> list[str]:
    taken = [capture for capture in incident.captures if capture.rounds]
    if not taken:
        return []
    return _section(
        f"Stacks of the capture of {words.utc(taken[-1].started_unix_seconds)}, every rank",
        raw_lines(taken[-1], incident.job.command),
        style,
    )


# --- the head --------------------------------------------------------------------------------------------------------


def _message_lines(verdict: Verdict, style: _Style) -> list[str]:
    """Return the message: red if a rank is named, green if nothing is stuck, else yellow, as in `hangwatch check`."""
    paint = style.bad if verdict.named else style.doubtful if verdict.stuck_on or verdict.check_first else style.good
    return [paint(line) for line in style.wrapped(verdict.message, "  ")]


def _verdict_lines(verdict: Verdict, style: _Style) -> list[str]:
    message = style.wrapped(verdict.message, "  ")
    return [*_message_lines(verdict, style), "=" * min(max(map(len, message)), style.width), ""]


def _heading(incident: Incident) -> list[tuple[str, str]]:
    job = incident.job
    size = f", world size {job.world_size:,}" if job.world_size is not None else ""
    return [
        ("Verdict", phrases.judgement(incident.verdict)),
        *_suspect_rows(incident.verdict, is_over=phrases.has_recovered(incident)),
        ("Its log", phrases.find_own_failure(incident.verdict)),
        phrases.state_row(incident),
        ("Timeout", phrases.time_out(incident)),
        ("Job", f"{words.describe_job(job)}, {job.launcher}"),
        ("Ranks", f"{phrases.ranks_row(job)} on {incident.node}{size}"),
        ("No process", f"local rank {words.fold_ranges(job.absent)}" if job.absent else ""),
        *_ranks_rows(incident.grouping)[1:],
        ("Without", phrases.without(incident.grouping, job)),
        ("Command", job.command),
        ("Incident", f"{incident.incident_id}, hangwatch {incident.hangwatch_version}".rstrip()),
    ]


def _suspect_rows(verdict: Verdict, *, is_over: bool = False) -> list[tuple[str, str]]:
    rows = [("Named", "; ".join(phrases.named(verdict))), ("Check first", "; ".join(phrases.check_first(verdict)))]
    if is_over:
        return [*rows, ("Was stuck on", verdict.stuck_on)]
    return [
        *rows,
        ("Stuck on", verdict.stuck_on),
        ("Do first", next_step(verdict)),
        ("Action", describe_action(verdict.action) if verdict.action.reason else ""),
    ]


def _ranks_rows(grouping: Grouping) -> list[tuple[str, str]]:
    seen = sum(len(group.members) for group in grouping.groups)
    total = "" if grouping.world_size is None else f" of {grouping.world_size:,}"
    if any(member.waiting for member in grouping.members):
        total = f"{total}, with launchers,"
    rows = (
        [("Ranks", f"{seen:,}{total} seen, in {words.count(len(grouping.groups), 'group')}")] if seen or total else []
    )
    missing = [("No response", grouping.unanswered), ("Not captured", grouping.absent_not_queried)]
    return rows + [
        (name, f"{words.count_ranges(absent)}: {words.elided(words.fold_ranges(absent), _FOLD_CHARACTERS)}")
        for name, absent in ([("Not in the input", grouping.absent)] if grouping.is_from_text else missing)
        if absent
    ]


# --- groups, evidence ------------------------------------------------------------------------------------------------


def _grouping_lines(grouping: Grouping, verdict: Verdict, style: _Style) -> list[str]:
    parts, odd = phrases.split_groups(grouping, verdict)
    shown, rest = phrases.shown_groups(parts, odd, _MAX_GROUPS)
    marks = dict.fromkeys(odd, phrases.mark(verdict))
    groups = [line for group in shown for line in _group_lines(group, marks.get(group.key), style)]
    lines = _section("Groups, largest first", [*groups, *([phrases.more_groups(rest)] if rest else [])], style)
    lines += _section("Evidence", _evidence_lines(verdict, style), style)
    return lines + _section("Notes", style.wrap_all(phrases.notes(grouping), 0), style)


def _short_group_lines(grouping: Grouping, verdict: Verdict, style: _Style, most: int) -> list[str]:
    """Return a line for each group, with the innermost frames of the marked ones as far as `most` lines allow."""
    parts, odd = phrases.split_groups(grouping, verdict)
    shown, rest = phrases.shown_groups(parts, odd, _SHORT_GROUPS)
    more = [phrases.more_groups(rest, "--full")] if rest else []
    hidden = [f"{words.count(len(verdict.evidence), 'line')} of evidence"] if verdict.evidence else []
    if notes := phrases.notes(grouping):
        hidden.append(words.count(len(notes), "note"))
    footer = f"--full adds stacks, {words.join_words([*hidden, 'details of the ranks'])}."
    lines, spare = ["", style.strong("Groups, largest first")], most - len(shown) - len(more) - 4
    for group in shown:
        mark = phrases.mark(verdict) if group.key in odd else None
        head = _group_head(group, mark, style, at=group_text.common_line([group]))
        has_frames = mark is not None or len(shown) == 1
        details = [*_fault_lines(group, style), *(_innermost_frames(group, style) if has_frames else ())]
        lines += [head, *details[: max(spare, 0)]]
        spare -= len(details)
    return [*lines, *more, "", style.faint(footer)]


def _innermost_frames(group: Group, style: _Style) -> Iterator[str]:
    """Yield the innermost frames of a group, then those of its workers that have a task."""
    own = innermost_user_frame(group)
    at = group.frames.index(own) if own in group.frames else 0
    if at < _SHORT_FRAMES:
        yield from _frame_lines(group.frames[:_SHORT_FRAMES], style)
    else:  # compiled frames hide the program
        yield from _frame_lines(group.frames[: _SHORT_FRAMES - 2], style)
        yield from ("      | ...", *_frame_lines(group.frames[at : at + 2], style))
    for stack in (*group.workers, *group.threads):
        if stack.user_frame is not None:
            yield style.faint(f"    {group_text.describe_stack(stack, group)}:")
            yield from _frame_lines(stack.frames[:_SHORT_FRAMES], style)


def _group_head(group: Group, mark: str | None, style: _Style, at: str = "") -> str:
    ids = phrases.group_ids(group)
    names = words.elided(words.fold_titles(ids), _FOLD_CHARACTERS)
    head = f"{words.count(len(ids), phrases.noun(group.members))}: {names}"
    does = "; ".join(filter(None, (f"{group_text.describe_in_report(group)}{printable(at)}", phrases.motion(group))))
    line = f"> {head}  {does}  <- {mark}" if mark else f"  {head}  {does}"
    return (style.odd if mark else style.strong)(line)


def _fault_lines(group: Group, style: _Style) -> Iterator[str]:
    if group.fault is not None:
        yield from style.wrapped(f"    {group.fault.subject}: {group.fault.detail}", "      ")
        yield from style.wrapped(f"    {group.fault.remedy}", "      ") if group.fault.remedy else ()


def _group_lines(group: Group, mark: str | None, style: _Style) -> Iterator[str]:
    ids = phrases.group_ids(group)
    yield _group_head(group, mark, style)
    second = ", ".join(f"{name} {text}" for name, text in phrases.numbers(group.members))
    if second:
        yield from style.wrapped(f"    {second}", "      ")
    yield from _fault_lines(group, style)
    if group.frames:
        yield style.faint(
            f"    {words.name_ranks(ids[:1])}:" if len(ids) == 1 else f"    as {words.name_ranks(ids[:1])}:"
        )
        yield from _frame_lines(group.frames, style)
    for stack in (*group.threads, *group.workers):
        yield style.faint(f"    {group_text.describe_stack(stack, group)}:")
        yield from _frame_lines(stack.frames, style)
    yield ""


def _frame_lines(frames: Sequence[Frame], style: _Style) -> Iterator[str]:
    lines = []
    for frame in frames:
        source = style.source_lines.get(structs.replace(frame, locals=()), "")
        room = max(style.width - len(str(frame)) - 12, _SOURCE_CHARACTERS)
        lines.append(f"{style.frame(frame)}{f': {words.elided(source, room)}' if source else ''}")
    yield from (f"      | {line}" for line in _folded(lines))


def _folded(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of frames. Of a long stack, only the first and the last ones: the raw stacks have all."""
    hidden = len(lines) - _INNER_FRAMES - _OUTER_FRAMES
    more = f"... {words.count(hidden, 'more frame')}"
    return lines if hidden < _LEAST_FOLDED else [*lines[:_INNER_FRAMES], more, *lines[-_OUTER_FRAMES:]]


def _evidence_lines(verdict: Verdict, style: _Style) -> Iterator[str]:
    for evidence in verdict.evidence:
        if evidence.kind in _SHOWN_BY_GROUPS:
            continue
        ranks = f" [{words.elided(words.fold_ids(evidence.ranks), _FOLD_CHARACTERS)}]" if evidence.ranks else ""
        yield from style.wrapped(f"{phrases.vote(evidence):<8} {evidence.kind}: {evidence.message}{ranks}", " " * 9)


def _detail_lines(incident: Incident, style: _Style) -> Iterator[str]:
    for rank in incident.captures[-1].ranks if incident.captures else ():
        if rank.details is not None:
            yield f"{words.name_ranks([rank.id])}:"
            yield from style.wrap_all((f"    {line}" for line in phrases.details(rank.details)), 6)


def _log_lines(incident: Incident) -> Iterator[str]:
    for rank in incident.captures[-1].ranks if incident.captures else ():
        for log in rank.last_lines:
            yield f"{words.name_ranks([rank.id])}: {printable(log.path)}"
            yield from (f"    | {printable(line)}" for line in log.lines)


def _capture_lines(captures: Sequence[Capture], style: _Style) -> Iterator[str]:
    for capture in captures:
        yield (
            f"{words.utc(capture.started_unix_seconds)}  {words.count(len(capture.ranks), 'rank')}, "
            f"{words.count(capture.rounds, 'round')}, {words.duration(capture.duration_seconds)}"
        )
        yield from style.wrap_all((f"    {note}" for note in capture.notes), 4)


# --- layout ----------------------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterable[str], style: _Style) -> list[str]:
    body = list(lines)
    while body and not body[-1]:
        body.pop()
    return ["", style.strong(title), "-" * len(title), *body] if body else []


def _table(rows: Iterable[tuple[str, str]], style: _Style) -> list[str]:
    rows = [(printable(name), text) for name, text in rows if text]
    indent = max((len(name) for name, _ in rows), default=0) + 2
    return [line for name, text in rows for line in style.wrapped(f"{name:<{indent}}{printable(text)}", " " * indent)]
