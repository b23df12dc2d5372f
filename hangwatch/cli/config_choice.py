"""The configuration of a command: the file of --config, else the default file, else the built-in defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hangwatch import config
from hangwatch.cli.options import DEFAULT_CONFIG
from hangwatch.errors import TemporaryError, UserError
from hangwatch.formats import toml_file

if TYPE_CHECKING:
    from hangwatch.checks.framework.contract import Settings as CheckSettings

Proof: TypeAlias = Callable[[config.Settings, str], object]


def settings_from(path: Path | None) -> tuple[config.Settings, str]:
    """Return the settings and their source: a file name or "the defaults". Raises ConfigError."""
    path = _chosen(path)
    return (config.load(path), str(path)) if path is not None else (config.Settings(), "the defaults")


def settings_with_checks(
    path: Path | None, proofs: Mapping[str, Proof] | None = None
) -> tuple[config.Settings, str, dict[str, CheckSettings]]:
    """Return the settings, their source (a file name or "the defaults"), and the settings of every check by name.

    `proofs` are further tests of the settings, by section. A section with wrong keys is not tested. Raises
    ConfigError with all problems, or the TemporaryError of a test if that is the only problem.
    """
    from hangwatch.checks.framework import registry

    path = _chosen(path)
    source, text = (str(path), config.read(path)) if path is not None else ("the defaults", "")
    problems: list[str] = []
    wrong: frozenset[str] = frozenset()
    checks: dict[str, CheckSettings] = {}
    try:
        settings = config.parse(text, source)
    except config.ConfigError as error:
        if not isinstance(error.valid_settings, config.Settings):
            raise
        problems, wrong, settings = [*error.problems], error.sections, error.valid_settings
    try:
        checks = registry.settings_for(settings, source, text)
    except config.ConfigError as error:
        problems += error.problems
    for section, prove in (proofs or {}).items():
        try:
            if section not in wrong:
                prove(settings, source)
        except config.ConfigError as error:
            problems += error.problems
        except UserError as error:
            problems.append(str(error))
        except TemporaryError:
            if not problems:
                raise
    if problems:
        raise config.ConfigError(*problems[: toml_file.MOST_PROBLEMS])
    return settings, source, checks


def _chosen(path: Path | None) -> Path | None:
    return DEFAULT_CONFIG if path is None and DEFAULT_CONFIG.exists() else path
