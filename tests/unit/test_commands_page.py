"""docs/commands.md and the man page are made from the commands. Shell completion works."""

import os
import shutil
import sys
from collections.abc import Callable

import click
import pytest

from hangwatch import cli
from tests import man_page
from tests.commands import HANGWATCH, finished


@pytest.mark.golden
def test_the_page_is_what_the_commands_say(golden: Callable[[str, str], None]) -> None:
    # In a separate process: a command that ran earlier without its group keeps the wrong help option.
    done = finished(sys.executable, "-m", "tests.commands_page")
    golden("../../../docs/commands.md", done.stdout)


@pytest.mark.golden
def test_the_man_page_has_every_command_and_option(golden: Callable[[str, str], None]) -> None:
    page = finished(sys.executable, "-m", "tests.man_page").stdout
    golden("../../../deploy/man/hangwatch.1", page)
    context = click.Context(cli.hangwatch)
    for name in cli.hangwatch.list_commands(context):
        assert f".SS hangwatch {name}" in page
        for parameter in cli.hangwatch.get_command(context, name).params:
            for option in parameter.opts if isinstance(parameter, click.Option) and not parameter.hidden else ():
                assert option.replace("-", "\\-") in page
    if shutil.which("man"):
        done = finished("man", "--warnings", "-l", "-", input=page, env={**os.environ, "LC_ALL": "C"})
        assert (done.returncode, done.stderr) == (0, "")


def test_the_shell_completes_commands() -> None:
    for shell, _, line in man_page.COMPLETION:
        assert f"_HANGWATCH_COMPLETE={shell}_source hangwatch" in line
    environ = {**os.environ, "COMP_WORDS": "hangwatch inc", "COMP_CWORD": "1", "_HANGWATCH_COMPLETE": "bash_complete"}
    done = finished(*HANGWATCH, env=environ)
    assert done.stdout.split() == ["plain,incidents"]
