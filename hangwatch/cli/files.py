"""Files that a command writes where the user says."""

from __future__ import annotations

from pathlib import Path

from hangwatch.cli.errors import InputError


def write_text(path: Path, content: str) -> None:
    """Write a file, or say why that cannot be. Raises InputError."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
