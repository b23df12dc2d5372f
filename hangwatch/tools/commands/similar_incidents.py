"""`hangwatch incidents --like`: the incidents with the fingerprint of one incident, on this node or on many."""

from collections.abc import Iterable, Sequence

import click
import msgspec
from msgspec.structs import replace

from hangwatch import words
from hangwatch.cli.reach import Reach
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import Summary
from hangwatch.model import Incident
from hangwatch.tools.commands.node_options import resolve_nodes, run_hangwatch
from hangwatch.verdict.recommendation import History, describe_hangs, with_action
from hangwatch.verdict.wording.action_text import describe_action


def find_similar(incident: Incident, summaries: Iterable[Summary]) -> list[Summary]:
    """Return the incidents with the fingerprint of `incident`, newest first. Raises InputError if it has none."""
    mark = incident.verdict.fingerprint
    if not mark:
        raise InputError(
            f"{incident.incident_id}: has no fingerprint: it has no stack, or an older hangwatch wrote it\n"
            "  `hangwatch incidents JOB` lists the incidents of a job"
        )
    alike = {(one.node, one.folder): one for one in summaries if one.fingerprint == mark and not one.problem}
    return sorted(alike.values(), key=lambda one: -one.opened_unix_seconds)


def read_nodes(reach: Reach) -> list[Summary]:
    """Return the incidents of all nodes. Raises InputError if no node responds."""
    from hangwatch.tools.fleet.node_replies import ReplyCollector, parse_answer

    problem = "sent no list of incidents: does it run the same version of hangwatch?"
    replies: ReplyCollector[incident_file.Incidents] = ReplyCollector(
        lambda printed, _: parse_answer(printed, incident_file.Incidents, problem), {0}
    )
    answers = run_hangwatch(reach, resolve_nodes(reach), "incidents --json", replies)
    if not answers:
        raise InputError("no node responded")
    return [replace(each, node=node) for node, answer in answers.items() for each in answer.incidents]


def print_similar(incident: Incident, similar: Sequence[Summary], *, as_json: bool) -> None:
    """Print the similar incidents, and the recommended action with the knowledge of all of them."""
    if as_json:
        answer = incident_file.Incidents(schema_version=1, incidents=tuple(similar))
        click.echo(msgspec.json.encode(answer))
        return
    rows = [
        (words.utc(each.opened_unix_seconds), each.node, each.folder, each.job_id, f"{each.verdict}: {each.message}")
        for each in similar
    ]
    print_table(("opened", "node", "incident", "job", "verdict"), rows, "no other incident has its fingerprint")
    opened = incident.opened_unix_seconds
    earlier = [
        incident_file.as_past_hang(each) for each in similar if each.has_hung and each.opened_unix_seconds < opened
    ]
    if earlier:
        click.echo(f"\nit hung at this place before: {describe_hangs(earlier)}")
        history = History(earlier, incident.node, incident.job.uid, unix_seconds=opened)
        verdict = with_action(incident.verdict, incident.grouping, history)
        click.echo(f"recommended action: {describe_action(verdict.action)}")
