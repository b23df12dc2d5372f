"""Exceptions of the command line, and lines to type in their messages."""

import shlex
import sys
from pathlib import Path

from hangwatch.errors import TemporaryError, UserError

_PROGRAM_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")  # in which sudo looks, see secure_path in sudoers(5)


class InputError(UserError):
    """Bad input. The message says what to type instead."""


class MachineError(TemporaryError):
    """A temporary failure of the machine. The same command may succeed later."""


def with_sudo() -> str:
    """Return the line to type to run this command as root. sudo finds no program of a virtual environment."""
    program = Path(sys.argv[0]).absolute()
    is_found = program.name != "hangwatch" or str(program.parent) in _PROGRAM_FOLDERS
    return shlex.join(["sudo", "hangwatch" if is_found else str(program), *sys.argv[1:]])
