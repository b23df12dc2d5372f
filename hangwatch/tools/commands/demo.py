"""`hangwatch demo`: a hang and its verdict, without a GPU."""

import logging
import shlex
import sys
import time
from pathlib import Path

import click


@click.command()
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2, 64), help="Ranks on the simulated node.")
@click.option("--seed", default=None, type=int, help="Choose the rank that gets stuck.  [default: random]")
@click.option(
    "--keep", "directory", type=click.Path(path_type=Path, file_okay=False), help="Write the report to this folder."
)
def demo(ranks: int, seed: int | None, directory: Path | None) -> int:
    """Show a hang and its verdict, without a GPU.

    Starts a job of real processes with simulated GPU power. One rank gets stuck, and hangwatch finds it.

    Exits 0 if hangwatch named the right rank, else 1.
    """
    from hangwatch.tools.demo import playback

    seed = int(time.time()) % 100000 if seed is None else seed
    logging.basicConfig(handlers=[logging.NullHandler()])  # the daemon's log goes to a file
    outcome = playback.play(ranks=ranks, seed=seed, say=click.echo, directory=directory)
    if outcome.report is not None:
        ours = [sys.executable, "-m", "hangwatch"] if sys.argv[0].endswith("__main__.py") else [sys.argv[0]]
        click.echo(f"again: {shlex.join([*ours, 'report', str(outcome.report)])}")
    return 0 if outcome.right else 1


COMMANDS = (demo,)
