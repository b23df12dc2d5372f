"""`hangwatch verdict`: feedback on verdicts; its statistics and its export as test cases, for `hangwatch incidents`."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

import click
import msgspec

from hangwatch import store, words
from hangwatch.cli import user_socket_client
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError, with_sudo
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import Summary
from hangwatch.model import LONGEST_CAUSE, Value
from hangwatch.report import anonymous_case
from hangwatch.tools.commands.output_files import NewFolder
from hangwatch.web import feedback

_HOW = "to give feedback: `hangwatch verdict INCIDENT --right` or `--wrong`"


class KindStatistics(Value, frozen=True):
    """The feedback on verdicts of one kind that name a rank (`is_named`), or of those that name none.

    `precision_ratio` is right / (right + wrong), None without feedback. `incidents` includes those without feedback.
    """

    verdict: str
    is_named: bool
    incidents: int
    right: int
    wrong: int
    precision_ratio: float | None


class FeedbackStatistics(Value, frozen=True):
    """The feedback on the incidents of a node, by kind of verdict. It is the output of `incidents --stats --json`."""

    schema_version: int
    kinds: tuple[KindStatistics, ...]


@click.command(short_help="Record whether the verdict of an incident was right.")
@click.argument("name", metavar="INCIDENT")
@click.option("--right", "is_right", is_flag=True, help="The named rank was the culprit, or none could be named.")
@click.option("--wrong", "is_wrong", is_flag=True, help="The verdict named another rank, or should have named one.")
@click.option("--culprit", type=click.IntRange(0), metavar="RANK", help="With --wrong: the rank that blocked the job.")
@click.option("--cause", default="", help=f"The cause, for readers of the report; at most {LONGEST_CAUSE} characters.")
@config_option
def verdict(
    *, name: str, is_right: bool, is_wrong: bool, culprit: int | None, cause: str, config_path: Path | None
) -> None:
    """Record whether the verdict of INCIDENT, a name from `hangwatch incidents`, was right.

    It replaces earlier feedback. Root, the owner of [store] directory and members of [store] group may give it.
    """
    if is_right == is_wrong:
        raise click.UsageError("give either --right or --wrong")
    if len(cause) > LONGEST_CAUSE:
        raise InputError(f"--cause has {len(cause)} characters: must be at most {LONGEST_CAUSE}")
    settings, _ = settings_from(config_path)
    incidents, uid = store.Store(Path(settings.store.directory)), os.geteuid()
    try:
        if _is_owner(incidents.incidents):
            with _owner_rights(incidents.incidents):
                done = feedback.record(incidents, name, is_right=is_right, culprit=culprit, cause=cause, by_uid=uid)
        else:
            wanted = {"incident": name, "right": int(is_right), "cause": cause}
            rank = {} if culprit is None else {"culprit": culprit}
            done = user_socket_client.verdict(settings.socket.path, urlencode(wanted | rank))
    except feedback.FeedbackError as error:
        raise InputError(str(error)) from None
    except user_socket_client.SocketError as error:
        raise InputError(f"{error}\n  type: {with_sudo()}") from None
    click.echo(done)


def _is_owner(incidents: Path) -> bool:
    """True for root and the owner of the folder of incidents. True without a folder: the search reports that."""
    try:
        return os.geteuid() in (0, incidents.stat().st_uid)
    except FileNotFoundError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def _owner_rights(incidents: Path) -> Iterator[None]:
    """Give root the rights of the owner of the folder of incidents: the daemon must be able to read the feedback."""
    uid, gid = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):  # the search for the incident reports it
        status = incidents.stat()
        if uid == 0:
            os.setegid(status.st_gid)
            os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)


def print_statistics(summaries: Iterable[Summary], *, as_json: bool) -> None:
    """Print a row for each kind of verdict: incidents, right and wrong verdicts, and precision.

    An incident counts for the verdict that its feedback is about, else for its present verdict.
    """
    by_kind: dict[tuple[str, bool], list[bool | None]] = {}
    for summary in summaries:
        given = summary.feedback
        kind = (summary.verdict, summary.is_named) if given is None else (given.verdict, bool(given.named))
        if not summary.problem:
            by_kind.setdefault(kind, []).append(None if given is None else given.is_right)
    kinds = tuple(_count(*kind, answers) for kind, answers in sorted(by_kind.items()))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(FeedbackStatistics(schema_version=1, kinds=kinds)) + b"\n")
        return
    totals = (
        _count("all", is_named, [answer for kind in by_kind if kind[1] is is_named for answer in by_kind[kind]])
        for is_named in (True, False)
    )
    header = ("verdict", "names a rank", "incidents", "right", "wrong", "precision")
    rows = [_make_row(counts) for counts in (*kinds, *totals)] if any(kind.right + kind.wrong for kind in kinds) else []
    incidents = words.count(sum(kind.incidents for kind in kinds), "incident")
    print_table(header, rows, f"no feedback on {incidents}\n  {_HOW}")


def _count(verdict: str, is_named: bool, answers: Sequence[bool | None]) -> KindStatistics:
    right, wrong = answers.count(True), answers.count(False)
    return KindStatistics(
        verdict=verdict,
        is_named=is_named,
        incidents=len(answers),
        right=right,
        wrong=wrong,
        precision_ratio=right / (right + wrong) if right + wrong else None,
    )


def _make_row(counts: KindStatistics) -> tuple[str, ...]:
    ratio = counts.precision_ratio
    numbers = (f"{number:,}" for number in (counts.incidents, counts.right, counts.wrong))
    return (counts.verdict, "yes" if counts.is_named else "no", *numbers, "-" if ratio is None else f"{ratio:.0%}")


def export_case(folder: Path, target: Path) -> None:
    """Write the incident in `folder` as an anonymous test case to `target`. Raises StoreError and InputError."""
    incident, given = incident_file.load(folder), incident_file.load_feedback(folder)
    if given is None:
        raise InputError(f"{folder.name}: has no feedback, so the right verdict is not known\n  {_HOW}")
    if not (incident.captures and incident.captures[-1].ranks):
        raise InputError(f"{folder.name}: has no stacks")
    try:
        files = anonymous_case.render_case(incident, given, target.absolute().name)
    except anonymous_case.UnknownAnswerError as error:
        raise InputError(
            f"{folder.name}: {error}\n  type: hangwatch verdict {folder.name} --wrong --culprit RANK"
        ) from None
    written = NewFolder(target)
    for name, content in files.items():
        written.write(".", name, content)
    click.echo(
        f"wrote {words.join_words(list(files))} to {target}: read them before you share them\n"
        f"  the verdict on these stacks: hangwatch explain {shlex.quote(str(target))}",
        err=True,
    )


COMMANDS = (verdict,)
