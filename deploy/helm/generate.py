"""Generator of the `config` part of the chart's values.schema.json.

`make golden` writes it. A test fails while the file is stale.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from hangwatch.checks.framework import registry
from hangwatch.config import Settings

CHART = Path(__file__).parent / "hangwatch"
SCHEMA = CHART / "values.schema.json"


def schema() -> str:
    """Return values.schema.json, with its `config` part made from the code's Settings.

    It uses draft 7 and `definitions`, because Helm 3 does not support newer drafts.
    """
    current = json.loads(SCHEMA.read_text())
    settings = {name: check.settings for name, check in registry.checks().items()}
    roots, parts = msgspec.json.schema_components([Settings, *settings.values()], ref_template="#/definitions/{name}")
    root = parts[roots[0]["$ref"].rpartition("/")[2]]
    root["properties"]["checks"] = {
        "type": "object",
        "properties": dict(zip(settings, roots[1:], strict=True)),
        "additionalProperties": False,
    }
    _narrow(root, parts)
    for part in parts.values():
        # Python indents a docstring as its source before 3.13.
        part["description"] = inspect.cleandoc(part.get("description", ""))
    current["definitions"] = dict(sorted(parts.items()))
    current["properties"]["config"] = roots[0]
    return json.dumps(current, indent=2) + "\n"


def _narrow(root: dict[str, Any], parts: dict[str, Any]) -> None:
    """Add the limits that a pod needs to the schema `root`: a fixed port and an absolute folder of the store."""
    root["required"] = ["http", "store"]
    parts["Http"]["required"] = ["port"]
    parts["Http"]["properties"]["port"]["minimum"] = 1
    parts["Http"]["properties"]["port"]["description"] = "the pod's port has to be known beforehand, so not 0"
    parts["Store"]["required"] = ["directory"]
    parts["Store"]["properties"]["directory"]["pattern"] = "^/.+"
