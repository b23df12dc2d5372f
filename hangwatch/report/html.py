"""The report of an incident as one HTML page. It needs no scripts and no other files."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hangwatch import words
from hangwatch.model import Feedback, Group, Grouping, Incident, RankDump, Value, Verdict
from hangwatch.report import phrases, sparklines, text
from hangwatch.report.dump_text import dump_files, rank_lines, shown_round
from hangwatch.report.event import render_event
from hangwatch.report.stack_tree import merge_tree
from hangwatch.verdict import environment_diff as variables
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.next_steps import describe_action, next_step

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

MAX_BYTES = 2_000_000
MAX_RAW_PER_GROUP = 8
MAX_ROWS = 60  # of evidence, timeline and notes; incident.json has all
_MAX_LINES_PER_RANK = 500
_MAX_TEXT = 1_000
_SPARKS_WIDTH = 110


class RawStacks(Value, frozen=True):
    """The stacks of one rank in one round of a capture. `rounds` is the text that tells which round."""

    rank_name: str
    lines: tuple[str, ...]
    rounds: str


_BOUNDS = ((40, 600_000), (8, 60_000), (2, 10_000))
"""Limits on the groups and on the characters of raw stacks. A page that is too large is rendered with the next ones."""


class Section(Value, frozen=True):
    """A group on the page, with the raw stacks of some ranks. `more` is the number of ranks without raw stacks."""

    group: Group
    odd: bool
    raw: tuple[RawStacks, ...]
    more: int


def render(incident: Incident, feedback: Feedback | None = None) -> str:
    """Return the HTML page of an incident. It is smaller than 2 MB for any number of ranks."""
    about = "" if feedback is None else phrases.describe_feedback(feedback, incident.verdict)
    return render_grouping(incident.grouping, phrases.past_verdict(incident), incident, about)


def render_files(incident: Incident) -> dict[str, str]:
    """Return the text of each file of an incident's folder except incident.json, by its path, for `store.save`."""
    pages = {"report.txt": text.render(incident), "report.html": render(incident), "event.json": render_event(incident)}
    return pages | dump_files(incident)


def render_grouping(grouping: Grouping, verdict: Verdict, incident: Incident | None = None, feedback: str = "") -> str:
    """Return the HTML page of dumps. Without an incident, it has no power, timeline or host section."""
    parts, odd = phrases.split_groups(grouping, verdict)
    template, style, style_hash = _template()
    is_closed = incident is not None and incident.closed_unix_seconds is not None
    tone = "over" if is_closed else "named" if verdict.named else "open"  # the CSS class of the headline
    for most_groups, raw_characters in _BOUNDS:
        shown, rest = phrases.shown_groups(parts, odd, most_groups)
        page = template.render(
            style=style,
            style_hash=style_hash,
            incident=incident,
            grouping=grouping,
            verdict=verdict,
            feedback=feedback,
            odd=odd,
            own=phrases.own_places(shown),
            seen=sum(len(group.members) for group in grouping.groups),
            trees=merge_tree(shown),
            sections=_make_sections(shown, odd, incident, raw_characters),
            more_groups=phrases.more_groups(rest) if rest else "",
            sparks=sparklines.draw_all(incident, _SPARKS_WIDTH) if incident is not None else (),
            tone=tone,
        )
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _make_sections(
    groups: Sequence[Group], odd: frozenset[str], incident: Incident | None, remaining_characters: int
) -> list[Section]:
    """Return a section for each group, with the raw stacks of a few ranks. Groups of suspects get theirs first."""
    dumps = {dump.id: dump for dump in incident.captures[-1].ranks} if incident and incident.captures else {}
    command = incident.job.command if incident else ""
    raw: dict[int, tuple[RawStacks, ...]] = {}
    for group in sorted(groups, key=lambda group: group.key not in odd):
        kept = []
        for rank in [rank for rank in phrases.group_ids(group) if rank in dumps][:MAX_RAW_PER_GROUP]:
            shown = _make_raw_stacks(dumps[rank], command)
            remaining_characters -= sum(map(len, shown.lines))
            kept += [shown] if remaining_characters > 0 else []
        raw[id(group)] = tuple(kept)
    return [
        Section(group=group, odd=group.key in odd, raw=raw[id(group)], more=len(group.members) - len(raw[id(group)]))
        for group in groups
    ]


def _make_raw_stacks(dump: RankDump, command: str) -> RawStacks:
    lines = [words.elided(line, _MAX_TEXT) for line in rank_lines(dump, command)]
    if len(lines) > _MAX_LINES_PER_RANK:
        lines = [*lines[:_MAX_LINES_PER_RANK], f"... {len(lines) - _MAX_LINES_PER_RANK} more lines in dumps/"]
    return RawStacks(rank_name=words.name_ranks([dump.id]), lines=tuple(lines), rounds=_describe_rounds(dump))


def _describe_rounds(dump: RankDump) -> str:
    """Return `the same in 3 rounds`, or the number of the shown round; "" if there is only one."""
    stacks = [tuple(thread.frames for thread in process.threads) for process in dump.rounds]
    if len(stacks) < 2:
        return ""
    if all(stack == stacks[0] for stack in stacks):
        return f"the same in {len(stacks)} rounds"
    return f"round {shown_round(dump) + 1} of {len(stacks)}; rounds differ: see dumps/"


@functools.lru_cache(maxsize=1)
def _template() -> tuple[Template, Markup, str]:
    """Return the compiled template, the style sheet, and its hash for the content security policy."""
    from markupsafe import Markup

    environment = _environment()
    style = environment.get_template("page.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("page.html.j2"), Markup(style), digest  # noqa: S704 - a file of this package


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hangwatch.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: words.elided(value, _MAX_TEXT) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        environment=variables,
        words=words,
        phrases=phrases,
        group_text=group_text,
        next_step=next_step,
        describe_action=describe_action,
        bar=lambda count, total: f"{max(100 * count / max(total, 1), 1.5):.1f}",  # in percent; a small bar is visible
        max_rows=MAX_ROWS,
    )
    return environment
