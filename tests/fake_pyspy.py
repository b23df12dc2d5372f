"""Fake py-spy programs: shell scripts that respond like the real one, or misbehave."""

from pathlib import Path

from tests.commands import write_program

VERSION = '[ "$1" = --version ] && { echo "py-spy 0.4.9"; exit 0; }'
"""Shell line with which a script reports a supported py-spy version."""


def fake_pyspy(folder: Path, body: str, version: str = VERSION) -> Path:
    """Write `folder`/py-spy. It runs `version` for `--version` and `body` for all other arguments."""
    folder.mkdir(exist_ok=True)
    return write_program(folder / "py-spy", f"{version}\n{body}")
