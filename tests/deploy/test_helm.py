"""The Helm chart under Helm's own engine: lint, rendering, refusals, and what Kubernetes would accept."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from helm_python import _native, chart
from hypothesis import given
from hypothesis import strategies as st

import hangwatch
from hangwatch import config
from tests.deploy import promql
from tests.deploy.promql import SITE_RULES

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy/helm/hangwatch"
RULES = REPOSITORY / "deploy/prometheus/hangwatch.rules.yaml"
DASHBOARDS = REPOSITORY / "grafana"
KUBERNETES = ["1.28", "1.32", kubernetes_validate.latest_version()]
OPERATOR_KINDS = {"PodMonitor", "PrometheusRule", "ServiceMonitor"}

MONITORED: dict[str, Any] = {
    "podMonitor": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True, "annotations": {"folder": "GPU"}},
}
EVERYTHING: dict[str, Any] = {
    **MONITORED,
    "fullnameOverride": "watcher",
    "image": {"tag": "2.0.0", "digest": f"sha256:{'0a' * 32}", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "hostNetwork": False,
    "kernelLog": True,
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "seLinuxOptions": {"type": "spc_t"},
    "appArmorProfile": {"type": "Localhost", "localhostProfile": "hangwatch"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
            }
        }
    },
    "priorityClassName": "system-node-critical",
    "podLabels": {"team": "infra"},
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "initContainers": [{"name": "wait", "image": "registry.example.com/wait:1", "command": ["wait-for-driver"]}],
    "extraArgs": ["--config", "/etc/tls/hangwatch.toml"],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "tls", "secret": {"secretName": "hangwatch-tls"}}],
    "extraVolumeMounts": [{"name": "tls", "mountPath": "/etc/tls", "readOnly": True}],
    "serviceAccount": {"annotations": {"owner": "infra"}},
    "config": {"http": {"web_config_file": "/etc/tls/web.yml"}},
}
WITHOUT: dict[str, Any] = {
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "commonLabels": {"team": "infra"},
    "hookScripts": {"page.sh": "#!/bin/sh\nexit 0\n"},
    "runtimeClassName": "",
    "nodeSelector": {"nvidia.com/gpu.present": None},
    "tolerations": [],
    "serviceAccount": {"create": False},
    "extraCapabilities": ["SYS_ADMIN"],
}
# No default: the site chooses the image repository.
IMAGE = "registry.example.com/hangwatch"
VALUES = {"default": {}, "monitored": MONITORED, "everything": EVERYTHING, "without": WITHOUT}


def with_image(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "image": {"repository": IMAGE, **values.get("image", {})}}


@cache
def loaded(path: Path = CHART) -> chart.Chart:
    return chart.Chart.load(path)


def manifests(values: dict[str, Any], kubernetes: str = "1.32", path: Path = CHART) -> dict[str, str]:
    """Render the chart by Helm's engine with a Kubernetes version. Return the texts of its files by name."""
    options = {"name": "release", "namespace": "gpu", "kube_version": f"v{kubernetes.removesuffix('.0')}.0"}
    rendered = _native.call_string(
        "helm_render", loaded(path)._raw(), json.dumps(with_image(values)), json.dumps(options)
    )
    return json.loads(rendered)


def objects(values: dict[str, Any], kubernetes: str = "1.32", path: Path = CHART) -> list[dict[str, Any]]:
    files = manifests(values, kubernetes, path)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def only(values: dict[str, Any], kind: str, kubernetes: str = "1.32") -> dict[str, Any]:
    (found,) = [one for one in objects(values, kubernetes) if one["kind"] == kind]
    return found


def container(values: dict[str, Any], kubernetes: str = "1.32") -> dict[str, Any]:
    (found,) = only(values, "DaemonSet", kubernetes)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def rendered_settings(values: dict[str, Any]) -> config.Settings:
    return config.parse(only({"config": values}, "ConfigMap")["data"]["hangwatch.toml"], "hangwatch.toml")


# --- lint, render, validate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_lint_has_nothing_to_say(values: dict[str, Any], kubernetes: str) -> None:
    report = chart.lint(CHART, with_image(values), strict=True, kube_version=f"v{kubernetes.removesuffix('.0')}.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_kubernetes_would_take_every_object(values: dict[str, Any], kubernetes: str) -> None:
    found = objects(values, kubernetes)
    assert len({(one["kind"], one["metadata"]["name"]) for one in found}) == len(found)
    for one in found:
        assert one["metadata"]["namespace"] == "gpu"
        if one["kind"] in OPERATOR_KINDS:
            assert one["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            assert kubernetes_validate.validate(one, kubernetes, strict=True) == kubernetes.removesuffix(".0")


def test_the_validation_can_fail() -> None:
    daemonset = only({}, "DaemonSet")
    daemonset["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(daemonset, "1.32", strict=True)


def test_labels_select_the_pods() -> None:
    for values in VALUES.values():
        spec = only(values, "DaemonSet")["spec"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    selectors = {
        kind: only(EVERYTHING, kind)["spec"][field]["matchLabels"]
        for kind, field in (("DaemonSet", "selector"), ("PodMonitor", "selector"), ("NetworkPolicy", "podSelector"))
    }
    assert len({tuple(sorted(one.items())) for one in selectors.values()}) == 1


# --- rights --------------------------------------------------------------------------------------------------------


def test_the_pod_has_the_rights_it_needs_and_no_other() -> None:
    pod = only({}, "DaemonSet")["spec"]["template"]["spec"]
    rights = container({})["securityContext"]
    assert pod["hostPID"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert rights["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH", "KILL", "SYSLOG"]}
    assert rights["privileged"] is False
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["readOnlyRootFilesystem"] is True
    assert "nvidia.com/gpu" not in json.dumps(container({})["resources"]), "a GPU would be taken from a job"
    assert [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume] == ["/var/lib/hangwatch"]


def test_the_capabilities_are_those_of_the_systemd_unit() -> None:
    unit = (REPOSITORY / "deploy/systemd/hangwatch.service").read_text()
    (line,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    added = container({})["securityContext"]["capabilities"]["add"]
    assert {f"CAP_{name}" for name in added} == set(line.split())


def test_the_kernel_log_takes_a_privileged_container() -> None:
    assert container({"kernelLog": True})["securityContext"]["privileged"] is True
    mounts = {mount["mountPath"]: mount for mount in container({"kernelLog": True})["volumeMounts"]}
    assert mounts["/dev/kmsg"]["readOnly"] is True
    assert "/dev/kmsg" not in {mount["mountPath"] for mount in container({})["volumeMounts"]}


def test_apparmor_is_a_field_from_1_30_and_an_annotation_before() -> None:
    def annotations(kubernetes: str, profile: dict[str, str]) -> dict[str, str]:
        template = only({"appArmorProfile": profile}, "DaemonSet", kubernetes)["spec"]["template"]
        return dict(template["metadata"]["annotations"])

    key = "container.apparmor.security.beta.kubernetes.io/hangwatch"
    assert container({}, "1.32")["securityContext"]["appArmorProfile"] == {"type": "Unconfined"}
    assert key not in annotations("1.32", {"type": "Unconfined"})
    assert "appArmorProfile" not in container({}, "1.28")["securityContext"]
    assert annotations("1.28", {"type": "Unconfined"})[key] == "unconfined"
    assert annotations("1.28", {"type": "RuntimeDefault"})[key] == "runtime/default"
    assert annotations("1.28", {"type": "Localhost", "localhostProfile": "hw"})[key] == "localhost/hw"


# --- image and start command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "pulled"),
    [
        ({}, f"{IMAGE}:{hangwatch.__version__}"),
        ({"tag": "9"}, f"{IMAGE}:9"),
        ({"tag": "9", "digest": f"sha256:{'0a' * 32}"}, f"{IMAGE}@sha256:{'0a' * 32}"),
        ({"repository": "hangwatch", "pullPolicy": "Never"}, f"hangwatch:{hangwatch.__version__}"),
    ],
)
def test_the_image_is_the_one_that_was_named(image: dict[str, str], pulled: str) -> None:
    assert container({"image": image})["image"] == pulled


@pytest.mark.parametrize(
    ("values", "error"),
    [
        # no image of a stranger is pulled from Docker Hub
        ({"image": {"repository": ""}}, "image.repository is empty, and no image of hangwatch is published"),
        ({"image": {"repository": "hangwatch"}}, "image.repository=hangwatch names no registry"),
        # a network policy would do nothing for a pod in the network of its host
        ({"networkPolicy": {"enabled": True}}, "set hostNetwork=false"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], error: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=re.escape(error)):
        manifests(values)


def test_what_is_added_comes_beside_what_the_chart_has() -> None:
    box, pod = container(EVERYTHING), only(EVERYTHING, "DaemonSet")["spec"]["template"]["spec"]
    assert box["args"] == ["run", "--config", "/etc/hangwatch/hangwatch.toml", *EVERYTHING["extraArgs"]]
    assert pod["initContainers"] == EVERYTHING["initContainers"]
    assert "initContainers" not in only({}, "DaemonSet")["spec"]["template"]["spec"]


# --- configuration -------------------------------------------------------------------------------------------------


def test_default_values_are_the_default_settings() -> None:
    assert rendered_settings({}) == config.Settings()


def test_port_and_folder_reach_every_place_that_names_them() -> None:
    values = {"config": {"http": {"port": 9999}, "store": {"directory": "/data/hw"}}}
    box = container({**values, **MONITORED})
    assert {port["name"]: port["containerPort"] for port in box["ports"]} == {"metrics": 9999, "health": 10000}
    pod = only(values, "DaemonSet")["spec"]["template"]["spec"]
    assert {"name": "state", "mountPath": "/data/hw"} in box["volumeMounts"]
    assert "/data/hw" in [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]


def test_probes_ask_a_port_of_their_own_without_tls() -> None:
    for health_port in (None, 8000):
        for tls in ({}, {"web_config_file": "/etc/web.yml"}):
            http = {**tls, **({} if health_port is None else {"health_port": health_port})}
            box = container({"config": {"http": http}})
            (port,) = [port["containerPort"] for port in box["ports"] if port["name"] == "health"]
            assert port == (health_port or config.Http().port + 1)
            for probe in ("livenessProbe", "readinessProbe"):
                assert box[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
            assert rendered_settings({"http": http}).http.health_port == (health_port or 0)


def test_a_slow_start_is_no_failure() -> None:
    box = container({})
    assert box["startupProbe"]["httpGet"] == box["livenessProbe"]["httpGet"]
    assert box["startupProbe"]["periodSeconds"] * box["startupProbe"]["failureThreshold"] == 120


def test_scripts_of_hooks_are_programs_that_the_daemon_accepts() -> None:
    values = {**WITHOUT, "config": {"hooks": {"on_hung": ["/hooks/page.sh", "{node}"]}}}
    scripts = next(one for one in objects(values) if one["metadata"]["name"] == "release-hangwatch-hooks")
    assert scripts["data"] == WITHOUT["hookScripts"]
    pod = only(values, "DaemonSet")["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "hooks"]
    assert volume["configMap"] == {"name": scripts["metadata"]["name"], "defaultMode": 0o555}
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "hooks"]
    assert (mount["mountPath"], mount["subPath"]) == ("/hooks/page.sh", "page.sh")
    assert not [one for one in container({})["volumeMounts"] if one["name"] == "hooks"]
    with pytest.raises(helm_python.HelmValuesError, match=re.escape("/hookScripts/page.sh")):
        manifests({"hookScripts": {"page.sh": "no program"}})


def test_common_labels_are_on_every_object_and_not_in_selectors() -> None:
    found = objects({**EVERYTHING, "commonLabels": {"cost": "gpu"}, "service": {"enabled": True}})
    pod = next(one for one in found if one["kind"] == "DaemonSet")["spec"]["template"]
    assert all(one["metadata"]["labels"]["cost"] == "gpu" for one in (*found, pod))
    assert "cost" not in json.dumps([one["spec"]["selector"] for one in found if "selector" in one.get("spec", {})])


def test_pods_are_replaced_when_the_configuration_changes() -> None:
    def checksum(values: dict[str, Any]) -> str:
        annotations = only(values, "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum({}) == checksum({"image": {"tag": "2"}})
    assert checksum({}) != checksum({"config": {"gpu": {"sample_seconds": 2}}})
    assert checksum({}) != checksum({"hookScripts": {"page.sh": "#!/bin/sh\n"}})


def test_rules_for_activities_and_nested_tables_become_toml() -> None:
    rules = [
        {"activity": "data_loading", "function": "read_<shard>", "file": '*/a "b".py'},
        {"activity": "x", "function": "y"},
    ]
    settings = rendered_settings({"activities": {"rules": rules}})
    assert [(rule.activity, rule.function, rule.file) for rule in settings.activities.rules] == [
        ("data_loading", "read_<shard>", '*/a "b".py'),
        ("x", "y", "*"),
    ]


# The characters that YAML permits: no control characters except tab and newline, no lone surrogates.
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\n\"'\\#{}"), min_size=1
)


@given(
    directory=texts.map(lambda text: f"/d{text}"),
    port=st.integers(1, 65535),
    max_bytes=st.integers(1 << 20, 1 << 53),
    hold=st.floats(1.0, 86400.0),
    quorum=st.floats(0.0, 1.0, exclude_min=True),
)
def test_any_value_arrives_in_the_daemon(directory: str, port: int, max_bytes: int, hold: float, quorum: float) -> None:
    settings = rendered_settings(
        {
            "store": {"directory": directory, "max_bytes": max_bytes},
            "http": {"port": port},
            "detector": {"hold_seconds": hold, "quorum": quorum},
        }
    )
    assert settings.store.directory == directory
    assert (settings.store.max_bytes, settings.http.port) == (max_bytes, port)
    assert (settings.detector.hold_seconds, settings.detector.quorum) == (hold, quorum)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"config": {"http": {"port": 70000}}}, "/config/http/port"),
        ({"config": {"http": {"port": "9836"}}}, "/config/http/port"),
        ({"config": {"http": {"port": 0}}}, "/config/http/port"),
        ({"config": {"http": {"port": None}}}, "missing property 'port'"),
        ({"config": {"http": None}}, "missing property 'http'"),
        ({"config": {"store": {"directory": "state"}}}, "/config/store/directory"),
        ({"config": {"store": {"directory": "/"}}}, "/config/store/directory"),
        ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "invalid propertyName 'app.kubernetes.io/name'"),
        ({"config": {"detector": {"hold": 60}}}, "'hold' not allowed"),
        ({"config": {"checks": {"no_such_check": {}}}}, "'no_such_check' not allowed"),
        ({"podMonitor": {"enabled": "yes"}}, "/podMonitor/enabled"),
        ({"tolerations": {"operator": "Exists"}}, "/tolerations"),
        ({"extraCapabilities": ["CAP_SYS_ADMIN"]}, "/extraCapabilities/0"),
        ({"hostNetwrk": True}, "'hostNetwrk' not allowed"),
        ({"image": {"digest": "0a0a"}}, "/image/digest"),
        ({"extraArgs": "--config"}, "/extraArgs"),
        ({"initContainers": [{"name": "no-image"}]}, "/initContainers/0"),
    ],
)
def test_a_wrong_value_is_refused_by_name_before_anything_is_installed(values: dict[str, Any], error: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=re.escape(error)):
        manifests(values)


def test_the_labels_of_the_chart_cannot_be_given_again() -> None:
    forbidden = json.loads((CHART / "values.schema.json").read_text())["properties"]["podLabels"]["propertyNames"][
        "not"
    ]
    own = only({}, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert set(own) == set(forbidden["enum"])


def test_a_hook_without_a_whole_path_is_refused_as_the_daemon_would() -> None:
    told = r"config\.hooks\.on_ended\[0\]=hooks/label-node\.sh must be an absolute path"
    with pytest.raises(helm_python.HelmRenderError, match=told):
        manifests({"config": {"hooks": {"on_hung": ["/hooks/a.sh", "x"], "on_ended": ["hooks/label-node.sh"]}}})
    whole = {"on_hung": ["/hooks/a.sh", "{node}"], "on_ended": [], "deadline_seconds": 5.0}
    assert rendered_settings({"hooks": whole}).hooks.on_hung == ("/hooks/a.sh", "{node}")


@pytest.mark.parametrize(
    ("interval", "timeout", "is_refused"),
    [("2s", "10s", True), ("1m", "61s", True), ("900ms", "1s", True), ("5s", "5s", False), ("1m", "59999ms", False)],
)
def test_scrape_that_may_last_longer_than_its_interval_is_refused(
    interval: str, timeout: str, is_refused: bool
) -> None:
    """The Prometheus operator only logs such a PodMonitor and ignores it."""
    values = {"podMonitor": {"enabled": True, "interval": interval, "scrapeTimeout": timeout}}
    if is_refused:
        with pytest.raises(helm_python.HelmRenderError, match=f"scrapeTimeout={timeout} is longer than"):
            manifests(values)
    else:
        assert only(values, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["interval"] == interval


# --- one source for rules and dashboards ---------------------------------------------------------------------------


def test_the_prometheus_rule_is_the_rules_file_and_what_the_site_says_of_itself() -> None:
    *groups, site = only(MONITORED, "PrometheusRule")["spec"]["groups"]
    assert {"groups": groups} == yaml.safe_load(RULES.read_text())
    (rule,) = site["rules"]
    assert rule == {"record": "hangwatch:site:info", "expr": "vector(1)", "labels": {"namespace": "gpu"}}


def test_alerts_take_the_addresses_and_labels_of_the_site() -> None:
    runbooks, grafana = "https://wiki.example.com/hangwatch", "https://grafana.example.com"
    wanted = {
        "enabled": True,
        "runbookBaseUrl": f"{runbooks}/",
        "grafanaUrl": grafana,
        "alertLabels": {"team": "ml", "severity": "none"},
    }
    *groups, site = only({"prometheusRule": wanted}, "PrometheusRule")["spec"]["groups"]
    (known,) = promql.rules(SITE_RULES.read_text())
    assert site["rules"][0]["labels"] == {"namespace": "gpu", "runbooks": runbooks, "grafana": grafana}
    assert known["record"] == site["rules"][0]["record"] and set(known["labels"]) < set(site["rules"][0]["labels"])
    file = [rule for rule in promql.rules(RULES.read_text()) if "alert" in rule]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts == [{**rule, "labels": {"team": "ml", **rule["labels"]}} for rule in file], (
        "severity stays the rule's"
    )


@pytest.mark.parametrize("url", ["grafana.example.com", "javascript:alert(1)", "https://a b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    for key in ("runbookBaseUrl", "grafanaUrl"):
        with pytest.raises(helm_python.HelmValuesError, match=key):
            manifests({"prometheusRule": {"enabled": True, key: url}})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_takes_the_rendered_rules(tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump(only(MONITORED, "PrometheusRule")["spec"]))
    subprocess.run(["promtool", "check", "rules", str(path)], check=True, capture_output=True)


def test_every_dashboard_becomes_a_config_map_unchanged() -> None:
    files = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    assert files
    maps = [one for one in objects(MONITORED) if one["metadata"]["labels"].get("grafana_dashboard")]
    shipped = {name: text for one in maps for name, text in one["data"].items()}
    assert {name: json.loads(text) for name, text in shipped.items()} == {
        f"hangwatch-{name}": json.loads(text) for name, text in files.items()
    }


def test_the_chart_holds_nothing_else_of_what_it_links_to() -> None:
    linked = [file["name"] for file in loaded().files if file["name"].startswith("files/")]
    dashboards = sorted(f"files/dashboards/{path.name}" for path in DASHBOARDS.glob("*.json"))
    assert sorted(linked) == [*dashboards, "files/hangwatch.rules.yaml"]


def test_a_packaged_chart_needs_no_links(tmp_path: Path) -> None:
    archive = Path(chart.package(CHART, destination=tmp_path))
    assert objects(EVERYTHING, path=archive) == objects(EVERYTHING)
    chart.expand(tmp_path / "out", archive)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]


def test_a_release_fits_into_its_secret(tmp_path: Path) -> None:
    # Helm keeps the packed chart in a Secret, and Kubernetes refuses a Secret above 1 MiB. base64 adds a third.
    archive = Path(chart.package(CHART, destination=tmp_path))
    assert archive.stat().st_size < 600_000


def test_scrapes_carry_the_job_and_instance_that_the_rules_ask_for() -> None:
    endpoint = only(MONITORED, "PodMonitor")["spec"]["podMetricsEndpoints"][0]
    by_service = {"serviceMonitor": {"enabled": True}}
    assert only(by_service, "ServiceMonitor")["spec"]["endpoints"] == [endpoint]
    service = only(by_service, "Service")["spec"]
    assert (service["clusterIP"], service["ports"][0]["name"]) == ("None", endpoint["port"])
    assert service["selector"] == only(by_service, "DaemonSet")["spec"]["selector"]["matchLabels"]
    with pytest.raises(helm_python.HelmRenderError, match="would scrape each pod twice"):
        manifests({**MONITORED, **by_service})
    targets = {rule["targetLabel"]: rule for rule in endpoint["relabelings"] if "targetLabel" in rule}
    (pattern,) = set(re.findall(r'up\{job=~"(.*?)"\}', RULES.read_text()))
    assert re.fullmatch(pattern, targets["job"]["replacement"])
    assert targets["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
    assert endpoint["port"] == container(MONITORED)["ports"][0]["name"]


# --- checks against outdated content ---------------------------------------------------------------------------------

# Functions of Helm 3.0 (its own and those of sprig 3). Helm 4 has all of them.
HELM_3 = {
    "add1", "and", "base", "contains", "default", "define", "else", "empty", "end", "eq", "fail", "first", "fromYaml", "get", "gt",
    "hasPrefix", "hasSuffix", "if", "include", "int", "int64", "keys", "kindIs", "merge", "mul", "nindent", "not", "or", "printf", "quote", "range", "replace", "required",
    "semverCompare", "set", "sha256sum", "sortAlpha", "ternary", "toJson", "toString", "toYaml", "trim", "trimSuffix",
    "trunc", "with",
}  # fmt: skip


def test_templates_use_only_functions_that_helm_3_has() -> None:
    used: set[str] = set()
    for template in CHART.glob("templates/*"):
        text = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", template.read_text(), flags=re.DOTALL)
        for action in re.findall(r"\{\{-?(.*?)-?\}\}", text, re.DOTALL):
            bare = re.sub(r'"[^"]*"', '""', action)
            used |= set(re.findall(r"(?<![\w.$])[a-zA-Z]\w*", bare))
    assert used <= HELM_3


@pytest.mark.golden
def test_schema_says_what_the_code_says(golden: Callable[[str, str], None]) -> None:
    generator = runpy.run_path(str(CHART.parent / "generate.py"))
    golden("../../../deploy/helm/hangwatch/values.schema.json", generator["schema"]())


def test_every_value_is_in_the_schema_and_every_schema_key_is_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema) - {"global"} == set(values)
    for key, part in schema.items():
        if "properties" in part and key not in ("appArmorProfile", "seccompProfile"):
            assert set(part["properties"]) == set(values[key]), key


def test_the_chart_has_the_version_of_the_package() -> None:
    metadata = loaded().metadata
    assert (metadata["version"], metadata["appVersion"]) == (hangwatch.__version__, hangwatch.__version__)


def test_notes_name_what_is_still_off() -> None:
    notes = manifests({})["hangwatch/templates/NOTES.txt"]
    assert "podMonitor.enabled=true" in notes
    assert "enabled=true" not in manifests(EVERYTHING)["hangwatch/templates/NOTES.txt"]
