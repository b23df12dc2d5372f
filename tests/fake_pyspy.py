"""Stand-ins for py-spy: shell scripts that a test writes, which answer as a real one might or misbehave."""

from __future__ import annotations

from pathlib import Path

VERSION = '[ "$1" = --version ] && { echo "py-spy 0.4.9"; exit 0; }'
"""How a script says that it is a py-spy that may be used."""


def fake_pyspy(folder: Path, body: str, version: str = VERSION) -> Path:
    """Write `folder`/py-spy, which answers `--version` as `version` does, and everything else as `body` does."""
    folder.mkdir(exist_ok=True)
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{version}\n{body}\n")
    path.chmod(0o755)
    return path
