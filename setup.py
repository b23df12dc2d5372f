"""Build step: write each data table as JSON beside its TOML, see `hangwatch.tables.load`."""

import json
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class BuildWithTables(build_py):
    """Copies the package, and adds the JSON of its tables."""

    def run(self) -> None:
        """Build, except in an editable installation, which reads the TOML."""
        super().run()
        for table in Path(self.build_lib, "hangwatch").rglob("*.toml"):
            Path(f"{table}.json").write_text(json.dumps(tomllib.loads(table.read_text("utf-8"))))


setup(cmdclass={"build_py": BuildWithTables})
