"""The hooks of deploy/hooks that call kubectl: the real kubectl against an API server that validates and authorizes."""

import json
import shutil
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from msgspec.structs import replace

from hangwatch import config, hooks
from hangwatch.model import JobState, Rank
from hangwatch.model.verdicts import RecommendedAction
from tests import samples
from tests.certificates import make_authority, make_certificate
from tests.commands import finished
from tests.deploy.test_helm import objects
from tests.kubernetes_api import VERSION, KubernetesApi, Object
from tests.other_users import needs_root

HOOKS = Path(__file__).parents[2] / "deploy" / "hooks"
MANIFESTS = HOOKS / "kubernetes"
SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "custom_resources.json").read_text())["kinds"]
NODE = samples.NODE
POD_SPEC = {"nodeName": NODE, "containers": [{"name": "train", "image": "registry.example.com/train:1"}]}
KEY = samples.mismatch().job.job_key
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl: apt install kubernetes-client"
)


class Cluster:
    """A cluster of one node and two pods of the same name in different namespaces. `pods` are their objects."""

    def __init__(self, api: KubernetesApi, kubeconfig: Path) -> None:
        self.api = api
        self._environ = {
            "KUBECONFIG": str(kubeconfig),
            "HOME": str(kubeconfig.parent),
        }  # kubectl writes a cache to HOME
        api.add("nodes", NODE)
        self.pods = [api.add("pods", "train-worker-0", team, spec=POD_SPEC) for team in ("team-a", "team-b")]

    @property
    def remaining(self) -> list[str]:
        return [pod["metadata"]["namespace"] for pod in self.api.find("pods")]

    def call(
        self, name: str, *arguments: str, action: str = "restart", named: int | None = 0, **job: object
    ) -> hooks.HookResult:
        """Run a hook as a daemon does for a job with a rank in each pod. `named` is the rank that the verdict names."""
        sample = samples.loader_hang()
        ranks = [
            Rank(
                id=replace(sample.job.ranks[0].id, pid=samples.rank_id(rank).pid or 0),
                rank=rank,
                local_rank=rank,
                pod=uid,
            )
            for rank, uid in enumerate(pod["metadata"]["uid"] for pod in self.pods)
        ]
        exclude = (NODE,) if action == "restart_elsewhere" else ()
        verdict = replace(
            sample.verdict,
            named=() if named is None else (samples.rank_id(named),),
            action=RecommendedAction(kind=action, exclude_nodes=exclude),  # type: ignore[arg-type]
        )
        incident = replace(sample, job=replace(sample.job, **{"ranks": tuple(ranks), **job}), verdict=verdict)
        call = hooks.due_hook(config.Hooks(on_hung=(str(HOOKS / name), *arguments)), incident, JobState.HUNG, None)
        return hooks.run(call._replace(environ={**call.environ, **self._environ}), 60.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with KubernetesApi(MANIFESTS / "rights.yaml") as api:
        yield Cluster(api, api.write_kubeconfig(tmp_path / "kubeconfig"))


def output_of(result: hooks.HookResult, outcome: str = "ok") -> str:
    assert result.outcome == outcome, result
    return result.output.decode()


@needs_kubectl
def test_pod_of_the_named_rank_is_deleted_once(cluster: Cluster) -> None:
    with ThreadPoolExecutor(3) as nodes:
        calls = [nodes.submit(cluster.call, "delete-pod.sh", "hangwatch", named=1) for _ in range(3)]
        printed = sorted(output_of(call.result()) for call in calls)
    assert cluster.remaining == ["team-a"]
    refused = f"job {KEY} was restarted before: no pod is deleted\n"
    assert printed[0] == "deleted pod team-b/train-worker-0\n" and printed[1:] == [refused] * 2
    cluster.pods = [cluster.api.add("pods", "train-worker-0", "team-b", spec=POD_SPEC)]
    assert output_of(cluster.call("delete-pod.sh", "hangwatch")) == refused, "the new pod hangs, too"
    assert cluster.remaining == ["team-a", "team-b"]


@needs_kubectl
def test_without_a_named_rank_all_pods_of_the_job_are_deleted(cluster: Cluster) -> None:
    cluster.api.add("pods", "other", "team-c", spec=POD_SPEC)
    assert output_of(cluster.call("delete-pod.sh", "hangwatch", named=None)).count("deleted pod") == 2
    assert cluster.remaining == ["team-c"]


@needs_kubectl
def test_new_pod_of_the_same_name_is_not_deleted(cluster: Cluster) -> None:
    """The controller replaces the pod after the hook has listed the pods."""
    cluster.api.before_delete = lambda: cluster.api.add("pods", "train-worker-0", "team-a", spec=POD_SPEC) and None
    assert "precondition" in output_of(cluster.call("delete-pod.sh", "hangwatch"), "failed")
    assert cluster.remaining == ["team-a", "team-b"]


@needs_kubectl
def test_limit_of_a_day_counts_all_jobs_of_all_nodes(cluster: Cluster) -> None:
    arguments = ("delete-pod.sh", "hangwatch", "1")
    output_of(cluster.call(*arguments, job_key="k1"))
    assert "no pod is deleted: limit 1 a day\n" in output_of(cluster.call(*arguments, named=1, job_key="k2"), "failed")
    assert cluster.remaining == ["team-b"]
    names = {one["metadata"]["name"].partition("-day-")[0] for one in cluster.api.find("configmaps")}
    assert names == {"hangwatch-restart-k1", "hangwatch"}, "the next hang of k2 may restart it"


@needs_kubectl
@pytest.mark.parametrize("action", ["wait", "fix_storage", "fix_network", "fix_program", "investigate"])
def test_no_pod_is_deleted_without_a_recommended_restart(cluster: Cluster, action: str) -> None:
    assert output_of(cluster.call("delete-pod.sh", "hangwatch", action=action)).endswith("no pod is deleted\n")
    assert cluster.api.used == set() and len(cluster.remaining) == 2


@needs_kubectl
def test_event_of_the_pod_holds_the_verdict(cluster: Cluster) -> None:
    assert output_of(cluster.call("kubernetes-event.sh")) == "event of Pod train-worker-0\n"
    (event,) = cluster.api.find("events")
    pod = cluster.pods[0]["metadata"]
    assert event["involvedObject"].items() >= {"kind": "Pod", "uid": pod["uid"], "namespace": "team-a"}.items()
    assert event["reason"] == samples.loader_hang().verdict.kind
    assert event["message"].startswith(f"job hung on {NODE}; recommended action: restart. Rank 7 (")


@needs_kubectl
def test_event_of_a_job_outside_of_pods_is_of_the_node(cluster: Cluster) -> None:
    cluster.pods = []
    output_of(cluster.call("kubernetes-event.sh"))
    (event,) = cluster.api.find("events")
    assert (event["metadata"]["namespace"], event["involvedObject"]["name"]) == ("default", NODE)


@needs_kubectl
def test_label_is_set_and_removed(cluster: Cluster) -> None:
    output_of(cluster.call("label-node.sh", "{node}", "{job_key}", "{state}"))
    (node,) = cluster.api.find("nodes")
    assert node["metadata"]["labels"] == {"hangwatch/hung": KEY}
    output_of(cluster.call("label-node.sh", "{node}", "{job_key}", "recovered", job_key="k2"))
    assert cluster.api.find("nodes")[0]["metadata"]["labels"], "the label of another job stays"
    output_of(cluster.call("label-node.sh", "{node}", "{job_key}", "recovered"))
    assert not cluster.api.find("nodes")[0]["metadata"]["labels"]


@needs_kubectl
def test_node_may_have_a_longer_name_in_kubernetes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    long = f"{NODE}.example.com"
    monkeypatch.setenv("NODE_NAME", long)
    cluster.api.add("nodes", long)
    for pod in cluster.pods:
        pod["spec"] = POD_SPEC | {"nodeName": long}
    output_of(cluster.call("kubernetes-event.sh"))
    output_of(cluster.call("label-node.sh", "{node}", "{job_key}", "{state}"))
    output_of(cluster.call("taint-node.sh", "on", action="restart_elsewhere"))
    output_of(cluster.call("delete-pod.sh", "hangwatch"))
    assert cluster.remaining == ["team-b"]
    short, found = cluster.api.find("nodes")
    assert ("labels" in short["metadata"]) is False
    assert ("labels" in found["metadata"]) is True
    assert len(found["spec"]["taints"]) == 1


@needs_kubectl
def test_taint_is_off_until_it_is_switched_on(cluster: Cluster) -> None:
    for arguments, action in (((), "restart_elsewhere"), (("off",), "restart_elsewhere"), (("on",), "restart")):
        assert "not tainted" in output_of(cluster.call("taint-node.sh", *arguments, action=action))
    assert cluster.api.used == set()
    output_of(cluster.call("taint-node.sh", "on", action="restart_elsewhere"))
    (node,) = cluster.api.find("nodes")
    (taint,) = node["spec"]["taints"]
    assert (taint["key"], taint["effect"]) == ("hangwatch/fault", "NoSchedule")


@needs_kubectl
def test_taint_has_a_limit_of_nodes(cluster: Cluster) -> None:
    for name in ("gpu-b01", "gpu-b02"):
        cluster.api.add("nodes", name, spec={"taints": [{"key": "hangwatch/fault", "effect": "NoSchedule"}]})
    refused = output_of(cluster.call("taint-node.sh", "on", "2", action="restart_elsewhere"), "failed")
    assert refused == f"{NODE} is not tainted: 2 other nodes are (limit: 2)\n"
    output_of(cluster.call("taint-node.sh", "on", "3", action="restart_elsewhere"))


IN_A_POD = """
mount -t tmpfs tmpfs /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$1/token" "$1/ca.crt" /run/secrets/kubernetes.io/serviceaccount
shift
exec "$@"
"""


@needs_kubectl
@needs_root
def test_hook_in_a_pod_uses_the_token_of_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_authority(tmp_path, "ca")
    served = make_certificate(authority, tmp_path, "api", "IP:127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(served.certificate, served.key)
    authority.certificate.rename(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("xyzzy")
    with KubernetesApi(MANIFESTS / "rights.yaml", tls, "xyzzy") as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.address.rpartition(":")[2])
        settings = config.Hooks(on_hung=(str(HOOKS / "kubernetes-event.sh"),))
        call = hooks.due_hook(settings, samples.loader_hang(), JobState.HUNG, None)
        command = ("unshare", "--mount", "sh", "-ec", IN_A_POD, "sh", str(tmp_path), *call.command)
        done = finished(*command, env={**call.environ, "HOME": str(tmp_path)})
        assert (done.stdout, done.stderr) == (f"event of Node {NODE}\n", "")
        assert len(api.find("events")) == 1


def manifests(name: str) -> list[Object]:
    return [one for one in yaml.safe_load_all((MANIFESTS / name).read_text()) if one]


def check_custom(manifest: Object) -> None:
    """Validate a custom resource. Its templates are validated as objects of Kubernetes."""
    schema = SCHEMAS[manifest["kind"]]["schema"]
    jsonschema.validate(manifest, schema)
    templates = list(_find_templates(manifest, schema))
    assert templates or manifest["kind"] == "TrainJob"
    for kind, template in templates:
        metadata = {"name": "name", **template.get("metadata", {})}
        if kind == "Job":
            wrapped = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}
        else:
            wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template}
        kubernetes_validate.validate(wrapped, VERSION, strict=True)


def _find_templates(value: Any, schema: Object) -> Iterator[tuple[str, Object]]:
    """Yield the parts of a custom resource that are templates of Kubernetes, with their kind."""
    if "$comment" in schema:
        yield schema["$comment"], value
    for key, part in value.items() if isinstance(value, dict) else ():
        others = schema.get("additionalProperties")
        of_part = schema.get("properties", {}).get(key) or (others if isinstance(others, dict) else None)
        if of_part is not None:
            yield from _find_templates(part, of_part)
    for part in value if isinstance(value, list) else ():
        yield from _find_templates(part, schema.get("items", {}))


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml", "trainjob.yaml"])
def test_example_of_a_job_is_valid(name: str) -> None:
    for manifest in manifests(name):
        check_custom(manifest)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pytorchjob.yaml", "restartPolicy: OnFailure", "restart: OnFailure"),
        ("pytorchjob.yaml", "command:", "commands:"),
        ("jobset.yaml", "maxRestarts: 3", "maxRestarts: often"),
        ("jobset.yaml", "backoffLimit: 0", "backofflimit: 0"),
        ("trainjob.yaml", "failurePolicy:", "failPolicy:"),
        ("trainjob.yaml", "numProcPerNode: 8", "numProcPerNode: auto"),
    ],
)
def test_wrong_example_of_a_job_is_refused(name: str, old: str, new: str) -> None:
    text = (MANIFESTS / name).read_text()
    assert old in text
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        for manifest in yaml.safe_load_all(text.replace(old, new)):
            check_custom(manifest)


def test_rights_are_valid() -> None:
    for manifest in manifests("rights.yaml"):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


@needs_kubectl
def test_hooks_use_every_right_that_they_ask_for(cluster: Cluster) -> None:
    cluster.call("kubernetes-event.sh")
    cluster.call("label-node.sh", "{node}", "{job_key}", "recovered")
    cluster.call("taint-node.sh", "on", action="restart_elsewhere")
    for rank in (0, 1):
        cluster.call("delete-pod.sh", "hangwatch", "1", job_key=f"k{rank}", named=rank)
    assert cluster.api.used == cluster.api.allowed


def test_values_give_the_chart_a_token_for_hooks() -> None:
    (values,) = manifests("chart-values.yaml")
    scripts = {"hookScripts": {"delete-pod.sh": (HOOKS / "delete-pod.sh").read_text()}}
    rendered = objects({**values, **scripts})
    for one in rendered:
        kubernetes_validate.validate(one, VERSION, strict=True)
    (daemonset,) = [one for one in rendered if one["kind"] == "DaemonSet"]
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/hooks/delete-pod.sh", "/var/run/secrets/kubernetes.io/serviceaccount"} <= mounted
