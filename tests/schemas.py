"""The JSON schemas of the commands' output, generated from its types. `make golden` writes them to docs/."""

import inspect
from pathlib import Path
from typing import Any

import msgspec

from hangwatch.checks.framework.result_table import JsonReport
from hangwatch.formats.incident_file import Incidents
from hangwatch.formats.sighting import GroupedDump
from hangwatch.model import Incident
from hangwatch.report.as_json import Answer, Dump, NodesDump
from hangwatch.report.event import HangEvent
from hangwatch.state.status import Status
from hangwatch.tools.commands.check_nodes import NodesCheck
from hangwatch.tools.commands.selftest import Answer as SelfTest

DOCS = Path(__file__).parents[1] / "docs"
FORMS: dict[str, type] = {
    "answer": Answer,
    "check": JsonReport,
    "check_nodes": NodesCheck,
    "dump": Dump,
    "event": HangEvent,
    "grouped": GroupedDump,
    "incident": Incident,
    "incidents": Incidents,
    "selftest": SelfTest,
    "nodes": NodesDump,
    "status": Status,
}
READ_BACK = {"incident", "grouped"}
"""Forms that hangwatch also reads from earlier versions. A newer field is optional in them.

In the other forms each field is required.
"""


def path(form: str) -> Path:
    return DOCS / f"{form}.schema.json"


def schema(form: str) -> str:
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(FORMS[form])}
    for part in made["$defs"].values():
        _polish(part, always=form not in READ_BACK)
    return msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n"


def _polish(part: dict[str, Any], *, always: bool) -> None:
    if "description" in part:
        part["description"] = inspect.cleandoc(part["description"])
    if always and part.get("type") == "object":
        part["required"] = list(part["properties"])
        for value in part["properties"].values():
            value.pop("default", None)
