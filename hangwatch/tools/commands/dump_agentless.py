"""`hangwatch dump --nodes --agentless`: one verdict over nodes that have py-spy but not hangwatch."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from hangwatch import config, words
from hangwatch.cli import screen
from hangwatch.cli.reach import Reach
from hangwatch.model import Grouping, RankId
from hangwatch.report import as_json, dump_text
from hangwatch.stacks.activity import load as load_activities
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.commands.node_options import resolve_nodes, run_hangwatch
from hangwatch.tools.commands.output import print_nodes_answer, verdict_text
from hangwatch.tools.commands.output_files import NewFolder
from hangwatch.tools.explain import traces
from hangwatch.tools.fleet import agentless, cross_node
from hangwatch.tools.fleet.agentless import Process

if TYPE_CHECKING:
    from hangwatch.cli.dump import DumpOptions


def dump_agentless(reach: Reach, question: DumpOptions, settings: config.Settings) -> int:
    """Run py-spy on many nodes and print one verdict per job. Return the exit code.

    It is 0, or 1 or 2 without a verdict. `reach.remote_command` is the shell command that runs py-spy.
    """
    nodes = resolve_nodes(reach)
    replies = agentless.collect_replies()
    jobs: dict[tuple[int, str], list[Process]] = defaultdict(list)
    stacks = None if question.raw is None else NewFolder(question.raw)

    def take(_: str, answer: agentless.NodeOutput) -> None:
        for process in answer.processes:
            jobs[process.job].append(process)
            if stacks is not None:
                id_ = _id(process)
                lines = "".join(f"{line}\n" for line in _lines(process))
                folder = f"uid{process.uid}-{hashlib.sha256(process.run.encode()).hexdigest()[:12]}"
                stacks.write(folder, f"{process.node}.{dump_text.file_name(id_)}", lines)

    rounds, wanted = question.rounds or 1, question.wanted or ""
    command = agentless.command(reach.remote_command, reach.deadline_seconds, rounds, wanted)
    run_hangwatch(reach._replace(remote_command=command), nodes, "", replies, take)
    if stacks is not None:
        click.echo(f"stacks: {words.count(stacks.files, 'file')} in {question.raw}", err=True)
    answers = []
    for (uid, run), processes in jobs.items():
        if question.wanted not in (None, run, run.partition("@")[0]):
            continue
        grouping = _grouped(processes, settings)
        silent = replies.silent if grouping.absent or grouping.world_size is None else ()
        verdict = cross_node.judge(grouping, None, silent, replies.clocks)
        answers.append(as_json.answer(grouping, verdict))
        if not question.as_json_form:
            on_nodes = words.fold_nodes(process.node for process in processes)
            click.echo(f"Job {words.printable(run).strip('@:') or 'unknown'} (user {uid}) on {on_nodes}\n")
            click.echo(verdict_text(grouping, verdict), color=screen.is_colored())
    if question.as_json_form:
        with_job = {process.node for processes in jobs.values() for process in processes}
        without_job = tuple(sorted(set(replies.answered) - with_job))
        print_nodes_answer(as_json.NodesDump, replies, without_job=without_job, jobs=tuple(answers))
    if not answers:
        click.echo(
            "no rank found: no torchrun, and no Python process with RANK in an environment that this user may read",
            err=True,
        )
    return 0 if answers else 2 if replies.failed and not replies.answered else 1


def _grouped(processes: Sequence[Process], settings: config.Settings) -> Grouping:
    sources = [(f"{process.node}.{dump_text.file_name(_id(process))}", _lines(process)) for process in processes]
    world_size = max((process.world_size or 0 for process in processes), default=0) or None
    collected = traces.collect(sources, world_size)
    grouping = group_ranks(collected.ranks, load_activities(settings.activities.rules), settings.capture, world_size)
    unknown = sum(process.rank is None for process in processes)
    notes = [
        f"{unknown} of {len(processes)} environments could not be read: these ranks have no number and are grouped by "
        "owner; run this command as their owner or as root"
    ] * bool(unknown)
    return replace(grouping, notes=(*grouping.notes, *collected.notes, *notes))


def _id(process: Process) -> RankId:
    return RankId(node=process.node, rank=process.rank, pid=process.pid)


def _lines(process: Process) -> Iterator[str]:
    """Yield the lines that py-spy printed, each with the prefix `[node:7]`, or `node: ` if the rank is not known."""
    lead = dump_text.prefix(_id(process))
    for printed in process.rounds:
        if not printed.startswith("Process "):  # an error message of py-spy, which does not contain the pid
            yield f"{lead}Process {process.pid}: python"
        yield from (f"{lead}{words.printable(line)}" for line in printed.rstrip("\n").split("\n"))
