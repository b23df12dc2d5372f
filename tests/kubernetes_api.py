"""A small Kubernetes API server on loopback for the real kubectl. It validates objects and enforces rights.

It has nodes, pods, events and ConfigMaps. Objects must match the schemas of Kubernetes. A request is refused unless a
rule of an RBAC manifest allows it.
"""

from __future__ import annotations

import itertools
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from tests.servers import Server

VERSION = "1.32"
Object: TypeAlias = dict[str, Any]
_PATH = re.compile(r"/api/v1(?:/namespaces/(?P<namespace>[\w.-]+))?/(?P<kind>\w+)(?:/(?P<name>[\w.-]+))?$")
_KINDS = {"nodes": "Node", "pods": "Pod", "events": "Event", "configmaps": "ConfigMap"}
_DISCOVERY: Mapping[str, Object] = {
    "/version": {"major": "1", "minor": VERSION.partition(".")[2], "gitVersion": f"v{VERSION}.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": name,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind != "Node",
                "verbs": ["create", "delete", "get", "list", "patch"],
            }
            for name, kind in _KINDS.items()
        ],
    },
}


class Refusal(Exception):  # noqa: N818 - a response
    """A request that the server refuses: HTTP status, reason and message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.status |= {"code": code, "reason": reason, "message": message}


class KubernetesApi(Server):
    """The server, from `with` until its end. `objects` are the stored objects, by resource, namespace and name.

    `rights` is the RBAC manifest. `used` are the verbs and resources of all requests that it allowed.
    `before_delete` is called before a pod is deleted.
    """

    def __init__(self, rights: Path, tls: ssl.SSLContext | None = None, token: str = "") -> None:
        super().__init__()
        rules = [rule for one in yaml.safe_load_all(rights.read_text()) for rule in one.get("rules", ())]
        self.allowed = {pair for rule in rules for pair in itertools.product(rule["verbs"], rule["resources"])}
        self.used: set[tuple[str, str]] = set()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.before_delete: Callable[[], None] = lambda: None
        self.token = token
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)

    def respond(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        code = 200
        try:
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refusal(401, "Unauthorized", "no valid token")
            answer = self.handle(request.command, request.path, json.loads(body or "{}"))
        except Refusal as refusal:
            answer, code = refusal.status, int(str(refusal.status["code"]))
        return code, "application/json", json.dumps(answer).encode()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a configuration of kubectl for this server."""
        cluster = {"name": "c", "cluster": {"server": self.url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
        path.write_text(json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "c"}))
        return path

    def add(self, resource: str, name: str, namespace: str = "", **fields: object) -> Object:
        """Store an object without a request. Return it."""
        uid = f"5e3ad5e0-0000-4000-8000-{next(self._numbers):012d}"
        metadata = {"name": name, "uid": uid} | ({"namespace": namespace} if namespace else {})
        stored = {"apiVersion": "v1", "kind": _KINDS[resource], "metadata": metadata, **fields}
        self.objects[resource, namespace, name] = stored
        return stored

    def find(self, resource: str) -> list[Object]:
        """Return the stored objects of a resource."""
        return [stored for (kind, _, _), stored in self.objects.items() if kind == resource]

    def handle(self, method: str, url: str, body: Object) -> Object:
        """Return the response to a request. Raises Refusal."""
        address = urlsplit(url)
        if method == "GET" and address.path in _DISCOVERY:
            return dict(_DISCOVERY[address.path])
        match = _PATH.match(address.path)
        if match is None or match["kind"] not in _KINDS:
            raise Refusal(404, "NotFound", f"{url}: not found")
        resource, namespace, name = match["kind"], match["namespace"] or "", match["name"] or ""
        verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]
        if (verb, resource) not in self.allowed:
            raise Refusal(403, "Forbidden", f"cannot {verb} {resource}")
        self.used.add((verb, resource))
        with self._lock:
            if verb == "list":
                wanted = dict(part.split("=") for part in parse_qs(address.query).get("fieldSelector", ()))
                return {
                    "kind": f"{_KINDS[resource]}List",
                    "apiVersion": "v1",
                    "items": list(self._select(resource, wanted)),
                }
            if verb == "create":
                return self._create(resource, namespace, body)
            key = (resource, namespace, name)
            if key not in self.objects:
                raise Refusal(404, "NotFound", f'{resource} "{name}" not found')
            if verb == "patch":
                self.objects[key] = self._valid(_merge(self.objects[key], body))
            if verb == "delete":
                self._delete(key, body)
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            return self.objects[key]

    def _select(self, resource: str, wanted: Mapping[str, str]) -> Iterable[Object]:
        assert wanted.keys() <= {"spec.nodeName"}, wanted
        return (
            one
            for one in self.find(resource)
            if wanted.get("spec.nodeName") in (None, one.get("spec", {}).get("nodeName"))
        )

    def _create(self, resource: str, namespace: str, body: Object) -> Object:
        metadata = body.get("metadata", {})
        name = metadata.get("name") or f"{metadata['generateName']}{next(self._numbers):05d}"
        if re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name) is None:
            raise Refusal(422, "Invalid", f"{name}: not a name")
        if metadata.get("namespace", namespace) != namespace:
            raise Refusal(400, "BadRequest", "the namespace of the object does not match the request")
        if (resource, namespace, name) in self.objects:
            raise Refusal(409, "AlreadyExists", f'{resource} "{name}" already exists')
        body = self._valid(body | {"metadata": metadata | {"name": name, "namespace": namespace}})
        if resource == "events":
            _check_event(body)
        self.objects[resource, namespace, name] = body
        return body

    def _delete(self, key: tuple[str, str, str], options: Object) -> None:
        if key[0] == "pods":
            self.before_delete()
        uid = self.objects[key]["metadata"].get("uid", "")
        if options.get("preconditions", {}).get("uid", uid) != uid:
            raise Refusal(409, "Conflict", f"the UID in the precondition does not match: {uid}")
        del self.objects[key]

    def _valid(self, body: Object) -> Object:
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refusal(422, "Invalid", str(error.message)) from error
        return body


def _check_event(event: Object) -> None:
    """Check what the API server checks beyond the schema (ValidateEventCreate in Kubernetes)."""
    if event["metadata"]["namespace"] != (event["involvedObject"].get("namespace") or "default"):
        raise Refusal(422, "Invalid", "involvedObject.namespace: does not match event.namespace")
    if len(event["message"]) > 1024 or len(event["reason"]) > 128 or event["type"] not in ("Normal", "Warning"):
        raise Refusal(422, "Invalid", "message, reason or type")


def _merge(value: Object, patch: Object) -> Object:
    """Return the object with a JSON merge patch applied (RFC 7396)."""
    merged = dict(value)
    for key, part in patch.items():
        if part is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key, {}), part) if isinstance(part, dict) else part
    return merged
