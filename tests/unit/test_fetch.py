"""URLs of nodes, requested incidents, Prometheus' response about the nodes of a job, and client credentials."""

import base64
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.formats import yaml_file
from hangwatch.formats.incident_file import Summary
from hangwatch.model import JobState
from hangwatch.tools.fleet import http_client, incident_fetch, prometheus
from hangwatch.tools.fleet.incident_fetch import AddressError, Site
from tests.certificates import make_authority, make_certificate

SITES = {
    "https://gpu-07:9836": Site("gpu-07:9836", "https://gpu-07:9836"),
    "https://gpu-07:9836/": Site("gpu-07:9836", "https://gpu-07:9836"),
    "http://gpu-07/hangwatch/": Site("gpu-07", "http://gpu-07/hangwatch"),
    "https://[2001:db8::7]:9836/incidents": Site("[2001:db8::7]:9836", "https://[2001:db8::7]:9836"),
    "https://gpu-07:9836/incidents/20260101T000000Z-42": Site("gpu-07:9836", "https://gpu-07:9836", "20260101T000000Z-42"),
    "https://gpu-07:9836/x/incidents/i-1/report.html": Site("gpu-07:9836", "https://gpu-07:9836/x", "i-1"),
}  # fmt: skip


@pytest.mark.parametrize("url", SITES)
def test_what_a_url_means(url: str) -> None:
    assert incident_fetch.parse_url(url) == SITES[url]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://alice:secret@gpu-07:9836", "contains a password"),
        ("https://alice@gpu-07", "contains a password"),
        ("ftp://gpu-07", "must be http"),
        ("https://", "must be http"),
        ("https://gpu-07:port", "port"),
        ("https://gpu-07/?x=1", "must be http"),
        ("https://gpu-07/#x", "must be http"),
        ("https://gpu 07/", "is not a valid URL"),
        ("https://gpu-07/\r\nHost: x", "is not a valid URL"),
        (f"https://{'a' * 3000}/", "is not a valid URL"),
        ("https://[::1", "Invalid IPv6"),
    ],
)
def test_what_cannot_be_meant(url: str, says: str) -> None:
    with pytest.raises(AddressError, match=says) as refused:
        incident_fetch.parse_url(url)
    assert "secret" not in str(refused.value)


@given(st.text(max_size=50))
def test_any_url_is_a_site_or_an_error(text: str) -> None:
    for url in (text, f"https://{text}", f"https://a/incidents/{text}"):
        try:
            found = incident_fetch.parse_url(url)
        except AddressError:
            continue
        assert found.base.isascii()
        assert not set(found.base) & set("\r\n ?#")
        assert "@" not in found.base.split("/")[2]


def test_names_are_without_ports_where_hosts_are_enough() -> None:
    urls = ["https://a:1", "https://b:1", "https://b:2", "https://[::1]:1", "https://a:1/incidents/x"]
    named = [one.node for one in incident_fetch.shorten_names([incident_fetch.parse_url(url) for url in urls])]
    assert named == ["a", "b:1", "b:2", "::1", "a"]


def listed(folder: str, key: str, at: float, closed: float | None = None, problem: str = "") -> Summary:
    return Summary(
        folder=folder, size_bytes=1, job_id=f"job-{key}", job_key=key, opened_unix_seconds=at,
        closed_unix_seconds=closed, state=JobState.HUNG, problem=problem,
    )  # fmt: skip


def test_of_each_job_the_newest_that_is_open_else_the_newest_of_all() -> None:
    closed = [listed("a1", "a", 1, 2), listed("b3", "b", 3, 4), listed("b2", "b", 2, 4)]
    assert incident_fetch.choose_incidents(closed, None) == ["b3"]
    still_open = [listed("a5", "a", 5), listed("a6", "a", 6), listed("c4", "c", 4)]
    assert incident_fetch.choose_incidents([*closed, *still_open], None) == ["a6", "c4"]
    assert incident_fetch.choose_incidents([*closed, *still_open], "b") == ["b3"]
    assert incident_fetch.choose_incidents([*closed, *still_open], "job-a") == ["a6"]
    assert incident_fetch.choose_incidents(closed, "nobody") == []
    named = [replace(one, job_name="llama" if one.job_key == "a" else "") for one in closed]
    assert (incident_fetch.choose_incidents(named, "llama"), incident_fetch.choose_incidents(named, "")) == (["a1"], [])


def test_of_a_hostile_list_no_path_is_asked_for_and_not_many() -> None:
    names = ["../x", "a/b", "a?x", "a\r\nHost: b", "", ".", "x" * 500, "a%2fb"]
    assert (
        incident_fetch.choose_incidents([listed(name, str(number), 1) for number, name in enumerate(names)], None) == []
    )
    assert incident_fetch.choose_incidents([listed("a", "a", 1, problem="broken")], None) == []
    crowd = [listed(f"i{number}", str(number), number) for number in range(1000)]
    assert len(incident_fetch.choose_incidents(crowd, None)) == incident_fetch.MOST_OF_A_NODE


def series(instance: str, key: str = "k", name: str = "train") -> dict[str, object]:
    return {"metric": {"instance": instance, "job": "hangwatch", "job_id": name, "job_key": key}, "value": [1, "1"]}


def target(instance: str, url: str) -> dict[str, object]:
    return {"labels": {"instance": instance, "job": "hangwatch"}, "scrapeUrl": url, "health": "up"}


class Api:
    """A fake HTTP API of Prometheus. It returns fixed responses and records the queries."""

    def __init__(self, series: list[dict[str, object]], targets: list[dict[str, object]]) -> None:
        self._found, self._targets = series, targets
        self.query = ""

    def get(self, path: str) -> bytes:
        parts = urlsplit(path)
        if parts.path == "/api/v1/targets":
            return json.dumps({"status": "success", "data": {"activeTargets": self._targets}}).encode()
        assert parts.path == "/api/v1/query"
        (self.query,) = parse_qs(parts.query)["query"]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": self._found}}).encode()


def test_the_nodes_of_a_job_are_those_of_its_series_and_served_beside_the_metrics() -> None:
    api = Api(
        [series("n1"), series("n2"), series("gone")],
        [target("n1", "https://10.0.0.1:9836/metrics"), target("n2", "http://n2/x/metrics?a=b"), target("n3", "http://c/metrics")],
    )  # fmt: skip
    key, sites, gone = prometheus.nodes_of('tra"in\\', api.get)
    assert (key, gone) == ("k", ["gone"])
    assert sites == [Site("n1", "https://10.0.0.1:9836"), Site("n2", "http://n2/x")]
    assert 'job_id="tra\\"in\\\\"' in api.query


def test_of_jobs_with_one_name_a_key_is_asked_for() -> None:
    both = Api([series("n1", "k1"), series("n2", "k2")], [])
    with pytest.raises(prometheus.PrometheusError, match="--job k1 or k2"):
        prometheus.nodes_of("train", both.get)
    assert prometheus.nodes_of("k2", both.get)[0] == "k2"
    with pytest.raises(prometheus.PrometheusError, match="has no job 'other' in the last 1h"):
        prometheus.nodes_of("other", Api([], []).get)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"<html>", b'{"data":{"result":[{"metric":{"instance":7}}]}}', b"[" * 9999]
)
def test_what_is_no_prometheus_is_told(body: bytes) -> None:
    with pytest.raises(prometheus.PrometheusError, match="as Prometheus does"):
        prometheus.nodes_of("train", lambda _: body)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "https://alice:x@n1/metrics", "gopher://x", "", "http://[::1"])
def test_a_target_at_a_strange_place_costs_itself_alone(url: str) -> None:
    api = Api([series("n1"), series("n2")], [target("n1", url), target("n2", "http://n2:9836/metrics")])
    _, sites, gone = prometheus.nodes_of("train", api.get)
    assert ([one.base for one in sites], gone) == (["http://n2:9836"], ["n1"])


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "http.yml"
    path.write_text(text)
    return path


def test_client_credentials_are_read_in_the_format_of_prometheus(tmp_path: Path) -> None:
    ca = make_authority(tmp_path, "ca")
    make_certificate(ca, tmp_path, "admin", "DNS:admin")
    (tmp_path / "password").write_text("pässword\n")
    found = http_client.load(
        config(
            tmp_path,
            "basic_auth:\n  username: alice\n  password_file: password\n"
            "tls_config:\n  ca_file: ca.pem\n  cert_file: admin.pem\n  key_file: admin-key.pem\n  server_name: gpu-07\n"
            "follow_redirects: false\n",
        )
    )
    assert found.authorization == "Basic " + base64.b64encode("alice:pässword".encode()).decode()
    assert [one["subject"] for one in found.tls.get_ca_certs()] == [((("commonName", "ca"),),)]
    (tmp_path / "token").write_text("0123\n")
    bearer = http_client.load(config(tmp_path, "authorization:\n  credentials_file: token\n"))
    assert bearer.authorization == "Bearer 0123"
    assert http_client.load(None).authorization is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("basic_auth:\n  username: a\n", ":1: basic_auth.password: set either password or password_file"),
        ("basic_auth:\n  username: a\n  password: b\n  password_file: c\n", ":3: basic_auth.password: set either"),
        ("basic_auth:\n  username: a\n  password_file: none\n", ":3: basic_auth.password_file: "),
        ("basic_auth:\n  username: 'a:b'\n  password: c\n", ":2: basic_auth.username: a user name must not"),
        ("basic_auth: {username: a, password: b}\nauthorization: {credentials: c}\n", ":2: authorization: cannot be used"),
        ('authorization:\n  credentials: "a\\r\\nHost: b"\n', ":1: authorization: contains characters"),
        ("oauth2:\n  client_id: a\n", ":1: oauth2: is not supported"),
        ("tls_config:\n  ca: PEM\n", ":2: tls_config.ca: is not supported"),
        ("tls_config:\n  ca_file: none\n", ":2: tls_config.ca_file: "),
        ("tls_config:\n  cert_file: none\n", ":1: tls_config: only one of cert_file and key_file"),
        ("tls_config:\n  cert_file: none\n  key_file: none\n", ":2: tls_config.cert_file: cannot be used"),
        ("follow_redirects: true\n", ":1: follow_redirects: is not supported"),
        ("passwort: x\n", ":1: passwort: is not a key"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_said_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    path = config(tmp_path, text)
    with pytest.raises(yaml_file.YamlError) as refused:
        http_client.load(path)
    assert str(refused.value).startswith(f"{path}{says}")
