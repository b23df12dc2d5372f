"""`hangwatch dump`: the stacks of the jobs on this node, and a verdict on each job."""

from pathlib import Path
from typing import Any, NamedTuple

import click

from hangwatch.cli.options import config_option, job_option, pid_option
from hangwatch.cli.reach import Reach, load_tool, nodes_options, parse_reach


class DumpOptions(NamedTuple):
    """The options of `hangwatch dump`, without the options that select nodes."""

    wanted: str | None
    pids: tuple[int, ...]
    rounds: int | None
    native: bool
    include_locals: bool
    all_processes: bool
    as_json_form: bool
    grouped: bool
    with_stacks: bool
    full: bool
    raw: Path | None
    directory: Path | None
    config_path: Path | None

    @property
    def is_special(self) -> bool:
        """True if the daemon cannot make this dump: it takes no pids, and dumps no native frames or locals."""
        return bool(self.pids or self.native or self.include_locals)

    @property
    def takes_all_processes(self) -> bool:
        """True if the workers for which no rank waits are dumped, too: all stacks are asked for."""
        shows_all = (self.as_json_form and not self.grouped) or self.with_stacks or self.directory is not None
        return self.all_processes or shows_all


@click.command(short_help="Take the stacks of all ranks now; name the blocking rank.")
@job_option("Dump only this job, by id, key or name.  [default: every job on this node]")
@pid_option(
    "Dump these processes instead of jobs. The pid of a launcher or an inference server means all its ranks. "
    "Repeatable."
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 10),
    help="Number of dumps of each rank, 5 s apart. Two or more show which ranks progress.  [default: 2 with --nodes, "
    "else 1, and another one if the first is unclear]",
)
@click.option("--native", is_flag=True, help="Add native frames. Slow: pauses each process for 0.7 s, needs 340 MB.")
@click.option("--locals", "include_locals", is_flag=True, help="Add local variables. They can contain secrets.")
@click.option(
    "--all-processes",
    is_flag=True,
    help="Dump the workers for which no rank waits, too; -o, --stacks and --json always do.",
)
@click.option(
    "--json", "as_json_form", is_flag=True, help="Print verdicts, groups and all stacks as JSON, see docs/json.md."
)
@click.option("--grouped", is_flag=True, help="As --json with one stack per group, the input of `hangwatch merge`.")
@click.option("--stacks", "with_stacks", is_flag=True, help="Add all raw stacks, also to --grouped.")
@click.option("--full", is_flag=True, help="Add the stacks of all groups, the evidence and details of the ranks.")
@click.option("--raw", type=click.Path(path_type=Path, file_okay=False), help="With --nodes: write all stacks to DIR.")
@click.option(
    "-o",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a report with all stacks to DIR/incidents/NAME, and print one line per job.",
)
@nodes_options
@config_option
def dump(**given: Any) -> int:
    """Take the stacks of all ranks now, and name the rank that blocks.

    Prints for each job on this node the verdict, what it is stuck on, what to do first, and the groups of ranks. --full
    adds the stacks of the groups and the evidence, --stacks, -o or --json every raw stack.

    --nodes and --jobid dump many nodes at the same time and give one verdict per job. A node that does not respond by
    the deadline is reported and is not an error. See docs/many-nodes.md.

    No process is stopped, except with --native. Exits 1 if there is nothing to dump.
    """
    options = DumpOptions(**{name: given.pop(name) for name in DumpOptions._fields})
    reach = parse_reach(given)
    options = options._replace(as_json_form=options.as_json_form or options.grouped)
    if reach is not None:
        return _dump_remote(reach, options)
    from hangwatch.cli.local_dump import dump_local  # it is imported only to run it

    return dump_local(options)


def _dump_remote(reach: Reach, options: DumpOptions) -> int:
    """Dump the jobs on other nodes. Return the exit code. Raises click.UsageError and InputError."""
    is_here = options.is_special or options.all_processes
    if is_here or options.grouped or options.with_stacks or options.full or options.config_path:
        raise click.UsageError(
            "--pid, --native, --locals, --all-processes, --grouped, --stacks, --full and --config cannot be used with "
            "--nodes or --jobid"
        )
    return load_tool("dump")(reach, options._replace(rounds=options.rounds or 2))


COMMANDS = (dump,)
