"""Which configuration a command goes by."""

from __future__ import annotations

from pathlib import Path

import click

from hangwatch import config

DEFAULT_CONFIG = Path("/etc/hangwatch/hangwatch.toml")

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"TOML file; without it {DEFAULT_CONFIG} where that exists, else the defaults.",
)


def settings_from(path: Path | None) -> tuple[config.Settings, str]:
    """The settings and the name to show for where they come from."""
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    return (config.load(path), str(path)) if path is not None else (config.Settings(), "the defaults")
