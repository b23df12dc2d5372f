"""`hangwatch explain`: a verdict from stack dumps and logs that the user already has."""

from pathlib import Path

import click

from hangwatch.cli.options import config_option, html_option, json_option
from hangwatch.limits import MOST_RANKS


@click.command(short_help="Name the blocking rank from dumps and logs that you have.")
@click.argument("paths", nargs=-1, metavar="FILE|DIR...", type=click.Path(path_type=Path))
@click.option(
    "--world-size", type=click.IntRange(1, MOST_RANKS), help="Number of ranks of the job, to find absent ranks."
)
@json_option
@html_option
@config_option
def explain(
    *,
    paths: tuple[Path, ...],
    world_size: int | None,
    as_json_form: bool,
    html_path: Path | None,
    config_path: Path | None,
) -> None:
    """Name the blocking rank from stack dumps and logs that you already have.

    Reads the output of py-spy (text or --json), pystack, gdb, Python's faulthandler and profiling.sampling of 3.15, of
    any number of processes.
    Lines may have a prefix: [host:rank], torchrun's [role3]:, srun --label's "3: ", mpirun --tag-output's
    [1,3]<stdout>:. Also reads:

    \b
    * logs of ranks, and torchelastic's error.json: which rank failed first, which log ends early
    * torch's flight recorder dumps, pickle (comm_lib_trace_rank_3) or JSON: which rank has not joined a collective
    * the output of `hangwatch dump --json`, and incidents

    A folder (such as torchrun's --log-dir) means all these files below it, without links, hidden files, source
    code and virtual environments.
    "-" is standard input, for text or the output of `hangwatch dump --json`.
    """
    if not paths:
        raise click.UsageError('nothing to explain: give FILE or DIR, or "-" for standard input')
    from hangwatch.cli.config_choice import settings_from  # what runs the command is imported only to run it
    from hangwatch.tools.commands.explain_files import explain_paths

    settings, _ = settings_from(config_path)
    explain_paths(paths, world_size, settings, as_json_form=as_json_form, html_path=html_path)


COMMANDS = (explain,)
