"""Generator of the chart's derived files: README.md from values.yaml, and the `config` part of values.schema.json.

`make golden` writes both. A test fails while either file is stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hangwatch.checks.framework import registry
from hangwatch.config import Settings

CHART = Path(__file__).parent / "hangwatch"
README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"

_KEY = re.compile(r"^( *)([A-Za-z][\w./-]*):")
_COMMENT = re.compile(r"^ *# ?(-- )?(.*)")


def readme() -> str:
    """Return the chart's README: its purpose, its installation, a table of every value."""
    text = (CHART / "values.yaml").read_text()
    chart, values = yaml.safe_load((CHART / "Chart.yaml").read_text()), yaml.safe_load(text)
    rows = [
        f"| `{'.'.join(path)}` | `{json.dumps(_at(values, path))}` | {comment.replace('|', chr(92) + '|')} |"
        for path, comment in _documented(text, values)
    ]
    return "\n".join(
        [
            f"# {chart['name']} {chart['version']}",
            "",
            f"{chart['description']}.",
            "",
            "How to build the image, install and check it: `docs/install-kubernetes.md`. In short, in a checkout:",
            "",
            "```",
            "helm upgrade --install hangwatch deploy/helm/hangwatch --namespace hangwatch --create-namespace \\",
            "  --set image.repository=REGISTRY/hangwatch \\",
            "  --set podMonitor.enabled=true --set prometheusRule.enabled=true --set dashboards.enabled=true",
            "```",
            "",
            "Rules and dashboards are links into the repository; `make chart` packages the files themselves.",
            "",
            "## Values",
            "",
            "Generated from `values.yaml`; types and limits: `values.schema.json`.",
            "",
            "| Value | Default | What it is |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


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


def _documented(text: str, values: dict[str, Any]) -> Iterator[tuple[list[str], str]]:
    """Yield the path and comment of each value for the README. A value with a comment covers all values below it."""
    path: list[str] = []
    comment: list[str] = []
    done: list[str] | None = None
    for line in text.splitlines():
        if not line.strip():
            comment = []
        elif line.lstrip().startswith("#"):
            found = _COMMENT.match(line)
            assert found
            comment = [found[2]] if found[1] else ([*comment, found[2]] if comment else [])
        elif key := _KEY.match(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            within = done is not None and path[: len(done)] == done
            leaf = not isinstance(_at(values, path), dict) or not _at(values, path)
            if not within and (comment or leaf):
                yield list(path), " ".join(comment)
                done = list(path)
            comment = []


def _at(values: dict[str, Any], path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values
