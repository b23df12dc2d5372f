"""`hangwatch slow --nodes`: the node of each job with ranks that are late as a whole."""

import shlex
import time

import click
import msgspec

from hangwatch import config, words
from hangwatch.cli.node_jobs import find_jobs, read_recorders
from hangwatch.cli.reach import Reach
from hangwatch.cli.text_tables import print_table
from hangwatch.collectives.arrival import list_collectives
from hangwatch.collectives.node_arrivals import NodeOrder, find_median_times
from hangwatch.model import Fault, RankId
from hangwatch.probes.node import host, timex
from hangwatch.report import as_json
from hangwatch.report.phrases import explain_faults
from hangwatch.tools.commands.node_options import describe_no_job, resolve_nodes, run_hangwatch
from hangwatch.tools.commands.output import print_nodes_answer
from hangwatch.tools.fleet.node_records import SCHEMA_VERSION, JobRecords, NodeRecords, Replies, compare

MOST_JOBS = 64  # of one node
MOST_SHOWN = 16  # nodes in a table
_NOT_NAMED = {
    "NoRecords": "fewer than two nodes with a synchronized clock hold the same collectives",
    "TooFewRecords": "too few steps are in the recorders of all nodes",
    "LateByRole": "a node is late, but only in a part of the job: this may be its role",
}


class SlowNodes(as_json.NodesAnswer, frozen=True):
    """The output of `hangwatch slow --nodes ... --json`: the order of the nodes of each job, by job key."""

    jobs: dict[str, NodeOrder]


def print_records(wanted: str | None, limits: config.Jobs) -> None:
    """Print the newest collectives of the jobs on this node as JSON, for `slow --nodes`, and on stderr the faults."""
    jobs = []
    for job in find_jobs(wanted, None, limits, every=True)[:MOST_JOBS]:
        by_rank, faults = {}, list[tuple[RankId, Fault]]()
        for rank, recorders, rank_faults in read_recorders(job):
            by_rank[rank.id] = [each for recorder in recorders for each in list_collectives(recorder, ())]
            faults += rank_faults
        for line in explain_faults("collectives", faults):
            click.echo(f"job {words.printable(job.job_id)}: {words.printable(line)}", err=True)
        jobs.append(JobRecords(job_id=job.job_id, job_key=job.key, places=find_median_times(by_rank)))
    clock = timex.read()
    records = NodeRecords(
        node=host.node_name(),
        printed_unix_seconds=time.time(),
        clock_error_seconds=None if isinstance(clock, Fault) else clock.largest_error_seconds,
        jobs=tuple(jobs),
    )
    click.echo(msgspec.json.encode(records))


def slow_nodes(reach: Reach, wanted: str | None, *, as_json_form: bool) -> int:
    """Compare the nodes of each job. Return the exit code: 0 if a node is named, 2 if no node responded, else 1."""
    replies = Replies()
    only = f" --job {shlex.quote(wanted)}" if wanted else ""
    records_by_node = run_hangwatch(reach, resolve_nodes(reach), f"slow --records{only}", replies)
    orders = compare(records_by_node)
    job_ids = {job.job_key: job.job_id for records in records_by_node.values() for job in records.jobs}
    if as_json_form:
        print_nodes_answer(SlowNodes, replies, schema_version=SCHEMA_VERSION, jobs=dict(orders))
    else:
        for key, order in orders.items():
            click.echo(f"job {words.printable(job_ids[key])} ({key}): {describe(order)}")
            _print_nodes(order)
        if replies.answered and not orders:
            click.echo(describe_no_job(replies.answered), err=True)
    if not replies.answered:
        return 2
    return 0 if any(order.reason == "" for order in orders.values()) else 1


def describe(order: NodeOrder) -> str:
    """Return a sentence: which node is late, by how much and where, or why no node is named."""
    if order.latest is None or order.reason in _NOT_NAMED:
        text = f"no node is named: {_NOT_NAMED[order.reason]}."
    else:
        seconds = order.lateness_seconds[order.latest]
        step = words.short_duration(order.step_seconds)
        amount = f"{words.short_duration(seconds)} ({order.lateness_ratio:.1%} of a step of {step})"
        others = words.count(len(order.lateness_seconds) - 1, "other node")
        match order.reason:
            case "NoneLate":
                text = f"no node is late. The latest is {order.latest}, by {amount}."
            case "WithinClockError":
                error = words.short_duration(order.clock_error_seconds)
                text = f"no node is named: {order.latest} is late by {amount}, but clocks may explain {error}."
            case _:
                text = (
                    f"{order.latest} is late by {amount}: its ranks enqueue {words.printable(order.operation)} of group"
                    f" {words.printable(order.group)} after the {others}, last in {order.last_ratio:.0%} of"
                    f" {order.records} steps. See which: hangwatch slow on {order.latest}."
                )
    if order.without_clock:
        nodes = words.fold_nodes(order.without_clock)
        text += f" Not compared: {nodes}: the clock is not synchronized (hangwatch check clock_skew)."
    return text


def _print_nodes(order: NodeOrder) -> None:
    rows = [
        (node, words.short_duration(seconds), f"{seconds / order.step_seconds:.1%}")
        for node, seconds in sorted(order.lateness_seconds.items(), key=lambda item: -item[1])[:MOST_SHOWN]
    ]
    if rows:
        print_table(("node", "late by", "of the step"), rows, "")
