"""The pages docs/install-*.md.

Their commands, options, paths, values and checks exist, and the real programs accept their snippets.
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import bcrypt
import click
import pytest
import yaml

from hangwatch import config
from hangwatch.checks.framework import registry
from hangwatch.cli import hangwatch as hangwatch_command
from hangwatch.web import web_config
from tests.certificates import make_authority, make_certificate
from tests.commands import finished

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted((REPOSITORY / "docs").glob("install-*.md"))
SYSTEMD, SLURM, KUBERNETES = (REPOSITORY / f"docs/install-{name}.md" for name in ("systemd", "slurm", "kubernetes"))
MANY_NODES = REPOSITORY / "docs/many-nodes.md"
SCHEMA = REPOSITORY / "deploy/helm/hangwatch/values.schema.json"


def blocks(page: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for spoken, text in found if spoken == language]


def typed(page: Path) -> list[str]:
    """Return every shell line on the page, with continuation lines joined, and every command in its text."""
    shell = "".join(blocks(page) + blocks(page, "sh")).replace("\\\n", " ")
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [*shell.splitlines(), *(found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", text))]


def hangwatch_calls(page: Path) -> list[list[str]]:
    """Return the arguments of each `hangwatch` command on the page."""
    names = "|".join(_commands())
    found = []
    for line in typed(page):
        for call in re.findall(rf"(?:^|[\s'/(])hangwatch ((?:{names})\b[^|&>`')]*)", line):
            found.append(shlex.split(call))
    return found


def _commands() -> dict[str, click.Command]:
    assert isinstance(hangwatch_command, click.Group)
    context = click.Context(hangwatch_command)
    found = {name: hangwatch_command.get_command(context, name) for name in hangwatch_command.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def test_there_is_a_page_for_each_way_to_install() -> None:
    assert sorted([SYSTEMD, SLURM, KUBERNETES]) == PAGES


def takes_value(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not parameter.is_flag


@pytest.mark.parametrize("page", [*PAGES, MANY_NODES], ids=lambda page: page.stem)
def test_commands_options_and_checks_exist(page: Path) -> None:
    calls = hangwatch_calls(page)
    assert len(calls) > 2
    for name, *arguments in calls:
        command = _commands()[name]
        options = {text for parameter in command.params for text in parameter.opts}
        assert {word for word in arguments if word.startswith("-") and word != "-"} <= options, (name, arguments)
        if name == "check":
            values = {text for parameter in command.params for text in parameter.opts if takes_value(parameter)}
            pairs = zip(["", *arguments], arguments, strict=False)
            named = {word for before, word in pairs if word[0] not in "-0123456789" and before not in values}
            assert named <= set(registry.checks()), arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_of_the_repository_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"(?<![\w./])((?:deploy|grafana|docs)/[\w./-]*\w)", text):
        assert (REPOSITORY / path).exists(), path
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def test_options_of_the_installer_exist() -> None:
    usage = finished(REPOSITORY / "deploy/systemd/install.sh", "--help", check=True)
    used = {word for line in typed(SYSTEMD) if "install.sh" in line for word in line.split() if word.startswith("--")}
    assert used
    assert used <= set(re.findall(r"--\w[\w-]*", usage.stdout))


def test_values_that_are_set_exist() -> None:
    keys = [key for line in typed(KUBERNETES) for key in re.findall(r"--set ([\w.]+)=", line)]
    assert len(keys) > 8
    schema = json.loads(SCHEMA.read_text())
    for key in keys:
        assert _knows(schema, schema, key.split(".")), key


def _knows(schema: dict[str, Any], part: dict[str, Any], path: list[str]) -> bool:
    while "$ref" in part:
        found: Any = schema
        for step in part["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        part = found
    if not path:
        return True
    inner = part.get("properties", {}).get(path[0]) or part.get("additionalProperties", True)
    return bool(inner) and _knows(schema, inner if isinstance(inner, dict) else {}, path[1:])


@pytest.mark.parametrize("snippet", blocks(KUBERNETES, "yaml"))
def test_the_helm_values_are_a_configuration(snippet: str) -> None:
    values = yaml.safe_load(snippet)
    settings = config.decode(values["config"], config.Settings, "values.yaml", ())
    assert registry.settings_for(settings, "values.yaml")
    schema = json.loads(SCHEMA.read_text())
    for part, keys in values.items():
        assert all(_knows(schema, schema, [part, key]) for key in keys), part


def test_the_web_configuration_is_one_but_for_its_files_and_hashes(tmp_path: Path) -> None:
    snippet, _ = blocks(SYSTEMD, "yaml")
    make_certificate(make_authority(tmp_path, "cluster-ca"), tmp_path, "node", "DNS:node")
    for name in ("node", "cluster-ca"):
        (tmp_path / f"{name}.pem").rename(tmp_path / f"{name}.crt")
    (tmp_path / "node-key.pem").rename(tmp_path / "node.key")
    hashed = bcrypt.hashpw(b"x", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(snippet.replace("$2y$10$...", hashed))
    rules = web_config.load(tmp_path / "web.yml")
    assert (rules.users, rules.verifies_clients) == ({"prometheus": hashed}, True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_prometheus_takes_the_snippet_with_the_rules(tmp_path: Path) -> None:
    _, snippet = blocks(SYSTEMD, "yaml")
    (tmp_path / "prometheus.yml").write_text(snippet)
    for name in yaml.safe_load(snippet)["rule_files"]:
        shutil.copy(REPOSITORY / "deploy/prometheus" / name, tmp_path)
    done = finished("promtool", "check", "config", "prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (pattern,) = set(re.findall(r'up\{job=~"(.*?)"\}', (tmp_path / "hangwatch.rules.yaml").read_text()))
    assert re.fullmatch(pattern, yaml.safe_load(snippet)["scrape_configs"][0]["job_name"])


def test_slurm_page_names_installed_scripts_that_run_checks() -> None:
    (installed,) = [line for line in typed(SLURM) if line.startswith("sudo install ")]
    *scripts, target = shlex.split(installed)[4:]
    assert len(scripts) == 2
    text = SLURM.read_text()
    for script in scripts:
        assert f"={target}{Path(script).name}\n" in text
        (default,) = re.findall(r"HANGWATCH_CHECK:-(.*?)}", (REPOSITORY / script).read_text(), re.DOTALL)
        _, named = default.split(" --fail-on critical ")
        checks = set(named.replace("\\\n", " ").split())
        assert checks
        assert checks <= set(registry.checks()) - {"oom", "xid", "ranks", "network"}
