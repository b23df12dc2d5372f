"""The cases of tests/data/servers.toml: processes with titles, as texts of py-spy."""

from typing import Any

from tests.conftest import load_table

TABLE = load_table("servers.toml")
CASES: list[dict[str, Any]] = TABLE["case"]


def pyspy_text(process: dict[str, Any], title: str | None = None) -> list[str]:
    """Return the dump of a process. `title` replaces its own title."""
    return [
        f"Process {process['pid']}: {process['title'] if title is None else title}",
        "Python v3.12.4 (/usr/bin/python3.12)",
        "",
        f'Thread {process["pid"]} (idle): "MainThread"',
        *(f"    {frame}" for frame in TABLE["stacks"][process["stack"]]),
        "",
    ]


def sources(case: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the texts of a case: one for each process, or one for all."""
    texts = [(process["pid"], pyspy_text(process)) for process in case["processes"]]
    if case.get("files"):
        return [(f"dumps/{pid}.txt", text) for pid, text in texts]
    return [("dump.txt", [line for _, text in texts for line in text])]
