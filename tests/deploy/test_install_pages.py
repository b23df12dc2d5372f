"""The pages docs/install-*.md: paths, values and checks exist, and the real programs accept the snippets."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from hangwatch import config
from hangwatch.checks.framework import registry
from hangwatch.web import web_config
from tests.certificates import make_authority, make_certificate
from tests.commands import finished
from tests.deploy.test_links import blocks, typed

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted((REPOSITORY / "docs").glob("install-*.md"))
SYSTEMD, SLURM, KUBERNETES = (REPOSITORY / f"docs/install-{name}.md" for name in ("systemd", "slurm", "kubernetes"))
SCHEMA = REPOSITORY / "deploy/helm/hangwatch/values.schema.json"


def test_there_is_a_page_for_each_way_to_install() -> None:
    assert sorted([SYSTEMD, SLURM, KUBERNETES]) == PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_of_the_repository_exist(page: Path) -> None:
    for path in re.findall(r"(?<![\w./])((?:deploy|grafana|docs)/[\w./-]*\w)", page.read_text()):
        assert (REPOSITORY / path).exists(), path


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
