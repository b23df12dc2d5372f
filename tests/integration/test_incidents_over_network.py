"""Incidents over the network, from a real server to real clients: only permitted users may read them."""

import base64
import http.client
import json
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import pytest
from msgspec.structs import replace

from hangwatch.config import Http
from hangwatch.report.html import render_files
from hangwatch.store import Store, open_writable
from hangwatch.web import auth
from hangwatch.web.http_server import usable_url
from tests import samples
from tests.certificates import TLS, client
from tests.commands import finished, hangwatch, refused
from tests.conftest import wait_for
from tests.servers import ask_port, served

SECRET = "s3cret-of-alice"
HASH = bcrypt.hashpw(SECRET.encode(), bcrypt.gensalt(4)).decode()
USERS = f"basic_auth_users:\n  alice: {HASH}\n"
CLIENTS = f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Store:
    kept = open_writable(tmp_path_factory.mktemp("state"))
    for at in (0.0, 60.0):
        hang = samples.loader_hang()
        incident = replace(hang, opened_unix_seconds=hang.opened_unix_seconds + at, incident_id=f"i{at:.0f}")
        kept.save(incident, render_files(incident))
    return kept


@contextmanager
def secured(kept: Store, text: str | None = None, folder: Path | None = None, **settings: object) -> Iterator[int]:
    """Run a server with this web configuration, saved in `folder` as web.yml. Yield its port."""
    if text is not None and folder is not None:
        (folder / "web.yml").write_text(text)
        settings["web_config_file"] = str(folder / "web.yml")
    with served(incidents=kept, **settings) as (port, _):
        yield port


def basic(user: str = "alice", password: str = SECRET) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def get(port: int, path: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, bytes]:
    return ask_port(port, path, context=context, **headers)[:2]


def folders(kept: Store) -> list[str]:
    return [summary.folder for summary in kept.summaries()]


def test_incidents_are_hidden_without_users_or_certificates(kept: Store, pki: Path) -> None:
    newest = folders(kept)[0]
    paths = ("/incidents", f"/incidents/{newest}/", f"/incidents/{newest}/incident.json")
    with secured(kept) as plain, secured(kept, TLS, pki) as tls:
        for path in paths:
            assert get(plain, path)[0] == 404
            assert get(plain, path, **basic())[0] == 404
            assert get(plain, path, Authorization=f"Bearer {TOKEN}")[0] == 404
            assert get(tls, path, client(pki))[0] == 404
        assert get(plain, "/metrics")[0] == get(tls, "/metrics", client(pki))[0] == 200


def test_correct_password_gives_access_to_list_and_files(kept: Store, pki: Path) -> None:
    newest, oldest = folders(kept)
    with secured(kept, USERS, pki) as port:
        status, body = get(port, "/incidents", **basic())
        listed = json.loads(body)
        assert status == 200
        assert [one["folder"] for one in listed["incidents"]] == [newest, oldest]
        for name in ("incident.json", "event.json", "report.txt", "report.html"):
            status, body = get(port, f"/incidents/{oldest}/{name}", **basic())
            assert (status, body) == (200, (kept.incidents / oldest / name).read_bytes())
        assert get(port, "/metrics", **basic())[0] == 200
        assert get(port, "/metrics")[0] == get(port, "/status")[0] == get(port, "/")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        basic("alice", "wrong"),
        basic("alice", ""),
        basic("eve", SECRET),
        basic("", SECRET),
        basic("alice", f"{SECRET}\0"),
        {"Authorization": f"Bearer {SECRET}"},
        {"Authorization": "Basic"},
        {"Authorization": "Basic !!!!"},
        {"Authorization": "Basic " + base64.b64encode(b"alice").decode()},
        {"Authorization": "Basic " + base64.b64encode(b"\xff\xfe:x").decode()},
        {"Authorization": f"Basic {HASH}"},
    ],
)
def test_missing_or_wrong_password_is_refused(headers: dict[str, str], kept: Store, pki: Path) -> None:
    with secured(kept, USERS, pki) as port:
        for path in ("/incidents", f"/incidents/{folders(kept)[0]}/incident.json", "/metrics"):
            assert get(port, path, **headers)[0] == 401, path


def test_a_token_is_enough_for_incidents_beside_users(kept: Store, pki: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with secured(kept, USERS, pki, incidents_token_file=str(tmp_path / "token")) as port:
        assert get(port, "/incidents", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(port, "/incidents", Authorization=f"Bearer {TOKEN}0")[0] == 401
        assert get(port, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 401
        assert get(port, "/incidents", **basic())[0] == 200


def test_client_without_valid_certificate_is_refused(kept: Store, pki: Path) -> None:
    with secured(kept, CLIENTS, pki) as port:
        for path in ("/incidents", f"/incidents/{folders(kept)[0]}/incident.json", "/metrics"):
            assert get(port, path, client(pki, shown="admin"))[0] == 200
            for stranger in (client(pki), client(pki, shown="stranger")):
                with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                    get(port, path, stranger)
        with pytest.raises(ssl.SSLCertVerificationError):
            get(port, "/incidents", client(pki, "other", shown="admin"))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(port, "/incidents")


def test_of_certificates_only_those_with_an_allowed_name(kept: Store, pki: Path) -> None:
    for allowed, status in (("admin.example", 200), ("10.0.0.1", 200), ("prometheus.example", 403)):
        with secured(kept, f"{CLIENTS}  client_allowed_sans: [{allowed}]\n", pki) as port:
            for path in ("/incidents", "/metrics"):
                assert get(port, path, client(pki, shown="admin"))[0] == status, allowed


def test_where_a_certificate_is_optional_incidents_need_it_or_a_password(kept: Store, pki: Path) -> None:
    optional = CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    with secured(kept, optional, pki) as port:
        assert get(port, "/incidents", client(pki, shown="admin"))[0] == 200
        assert get(port, "/incidents", client(pki))[0] == 403
        assert get(port, "/metrics", client(pki))[0] == 200
    with secured(kept, optional + USERS, pki) as port:
        assert get(port, "/incidents", client(pki, shown="admin"))[0] == 401
        assert get(port, "/incidents", client(pki), **basic())[0] == 200


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_no_path_leads_out_of_the_store(tls: bool, kept: Store, pki: Path, tmp_path: Path) -> None:
    newest = folders(kept)[0]
    (kept.incidents / newest / "order-link.txt").unlink(missing_ok=True)
    strange = kept.incidents / "20260101T000000Z-link"
    strange.unlink(missing_ok=True)
    strange.symlink_to(tmp_path)
    (tmp_path / "report.txt").write_text("outside")
    inner = kept.incidents / "20260101T000000Z-inner"
    inner.mkdir(exist_ok=True)
    (inner / "report.txt").unlink(missing_ok=True)
    (inner / "report.txt").symlink_to(tmp_path / "report.txt")
    context = client(pki) if tls else None
    try:
        with secured(kept, (TLS if tls else "") + USERS, pki) as port:
            for path in (
                f"/incidents/{strange.name}/report.txt",
                f"/incidents/{inner.name}/report.txt",
                f"/incidents/{newest}/order",
                f"/incidents/{newest}/dumps/1-1/rank0.txt",
                f"/incidents/{newest}/../{newest}/report.txt",
                f"/incidents/{newest}/..%2f{newest}%2freport.txt",
                f"/incidents/{newest}%2freport.txt",
                f"/incidents/{newest}%2Freport.txt",
                f"/incidents/%2e%2e/{newest}/report.txt",
                f"/incidents/{newest}//report.txt",
                f"/incidents/{newest}/report.txt/",
                f"/incidents/{newest}/report.txt%00",
                f"/incidents/{newest}\\report.txt",
                "/incidents/../lock",
                "/incidents//etc/passwd",
                "/incidents/../../../../../../etc/passwd",
                "//incidents/",
                "/incidentsx",
            ):
                status, body = get(port, path, context, **basic())
                assert (status, b"outside" in body, b"root:" in body) == (404, False, False), path
            assert get(port, "/incidents?folder=/etc", context, **basic())[0] == 200
    finally:
        strange.unlink()
        (inner / "report.txt").unlink()
        inner.rmdir()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_what_is_too_large_or_no_question_is_refused(tls: bool, kept: Store, pki: Path) -> None:
    context = client(pki) if tls else None

    def sent(request: bytes) -> bytes:
        found = b""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            one = context.wrap_socket(raw, server_hostname="127.0.0.1") if context else raw
            try:
                one.sendall(request)
                while part := one.recv(65536):
                    found += part
            except OSError:
                pass
        return found.split(b"\r\n")[0]

    with secured(kept, (TLS if tls else "") + USERS, pki) as port:
        head = b"GET /incidents HTTP/1.1\r\nHost: a\r\nAuthorization: Basic "
        assert sent(head + b"A" * 200_000 + b"\r\n\r\n") == b""
        assert b"431" in sent(head + b"A" * 20_000 + b"\r\n\r\n")
        assert b"401" in sent(head + b"A" * 10_000 + b"\r\n\r\n")
        assert sent(b"GET /incidents/" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n") == b""
        assert b"405" in sent(b"DELETE /incidents HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"400" in sent(b"POST /incidents HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        assert get(port, "/incidents", context, **basic())[0] == 200


def test_a_client_that_does_not_read_holds_no_file_in_memory_and_no_other_up(kept: Store, pki: Path) -> None:
    """Connect 20 clients that read only the first bytes of an incident of 16 MB."""
    big = kept.incidents / folders(kept)[1] / "report.txt"
    before = big.read_bytes()
    os.truncate(big, 16 << 20)
    authorization = basic()["Authorization"].encode()
    request = b"GET /incidents/%b/report.txt HTTP/1.1\r\nHost: a\r\nAuthorization: %b\r\n\r\n"
    try:
        with secured(kept, USERS, pki) as port:
            crowd = []
            rss = _rss_bytes()
            for _ in range(20):
                one = socket.create_connection(("127.0.0.1", port), timeout=60)
                one.sendall(request % (big.parent.name.encode(), authorization))
                assert one.recv(12) == b"HTTP/1.1 200"
                crowd.append(one)
            assert get(port, "/incidents", **basic())[0] == 200
            assert _rss_bytes() - rss < 160 << 20  # 20 whole files are 320 MiB
            for one in crowd:
                one.close()
            status, body = get(port, f"/incidents/{big.parent.name}/report.txt", **basic())
            assert (status, len(body)) == (200, 16 << 20)
    finally:
        big.write_bytes(before)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_certificate_and_users_that_change_are_taken_and_what_is_broken_is_not(
    kept: Store, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.05)
    for name in ("node", "ca"):
        for ending in (".pem", "-key.pem"):
            shutil.copy(pki / f"{name}{ending}", tmp_path)
    web = tmp_path / "web.yml"

    def shown(port: int) -> str:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
            client(pki).wrap_socket(raw, server_hostname="127.0.0.1") as one,
        ):
            (name,) = [value for ((key, value),) in one.getpeercert()["subject"] if key == "commonName"]  # type: ignore[index,misc,union-attr]
            return str(name)

    with secured(kept, TLS + USERS, tmp_path) as port:
        assert shown(port) == "node"
        (tmp_path / "node-key.pem").write_bytes(b"")
        wait_for(lambda: "cannot be used; the previous rules stay in force" in caplog.text, "the broken key to be told")
        assert shown(port) == "node"
        shutil.copy(pki / "renewed.pem", tmp_path / "node.pem")
        shutil.copy(pki / "renewed-key.pem", tmp_path / "node-key.pem")
        wait_for(lambda: shown(port) == "renewed", "the new certificate")
        assert get(port, "/incidents", client(pki), **basic())[0] == 200
        web.write_text(TLS + USERS.replace("alice", "bob"))
        wait_for(lambda: get(port, "/incidents", client(pki), **basic("bob"))[0] == 200, "the new user")
        assert get(port, "/incidents", client(pki), **basic())[0] == 401
        web.write_text("")
        wait_for(lambda: "has weaker rules than before" in caplog.text, "the empty file to be told")
        assert get(port, "/incidents", client(pki), **basic("bob"))[0] == 200
        assert get(port, "/metrics", client(pki))[0] == 401


def curl(*arguments: str) -> tuple[int, str]:
    """Run curl(1). Return its exit code and the HTTP status that it received."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    options = ("--silent", "--max-time", "60", "--output", "/dev/null", "--write-out", "%{http_code}")
    done = finished("curl", *options, *arguments)
    return done.returncode, done.stdout


def test_curl_is_let_in_and_refused(kept: Store, pki: Path, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login alice password {SECRET}\n")
    admin = ("--cert", str(pki / "admin.pem"), "--key", str(pki / "admin-key.pem"))
    stranger = ("--cert", str(pki / "stranger.pem"), "--key", str(pki / "stranger-key.pem"))
    trusted = ("--cacert", str(pki / "ca.pem"))
    with secured(kept, USERS, pki) as plain, secured(kept, CLIENTS + USERS, pki) as tls:
        assert curl(f"http://127.0.0.1:{plain}/incidents", "--netrc-file", str(netrc)) == (0, "200")
        assert curl(f"http://127.0.0.1:{plain}/incidents", "--user", "alice:wrong") == (0, "401")
        url = f"https://127.0.0.1:{tls}/incidents"
        assert curl(url, *trusted, *admin, "--netrc-file", str(netrc)) == (0, "200")
        assert curl(url, *trusted, *admin) == (0, "401")
        assert curl(url, *trusted, "--netrc-file", str(netrc))[0] != 0
        assert curl(url, *trusted, *stranger, "--netrc-file", str(netrc))[0] != 0
        assert curl(url, "--cacert", str(pki / "other.pem"), *admin)[0] == 60


def test_a_bad_web_configuration_ends_config_check_and_run_with_2(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("basic_auth_users:\n  alice: secret\n")
    path = tmp_path / "hangwatch.toml"
    path.write_text(f'[store]\ndirectory = "{tmp_path}/state"\n[http]\nweb_config_file = "{tmp_path}/web.yml"\n')
    says = f"[http] web_config_file: {tmp_path}/web.yml:2: basic_auth_users.alice: is not a bcrypt hash"
    refused("config", "--check", str(path), says=says)
    refused("run", "--config", str(path), says=says)


URL = "http://{node}:9836"
READERS = {
    "nobody": ("", {}, False),
    "TLS without clients": (TLS, {}, False),
    "users": (USERS, {}, True),
    "client certificates": (CLIENTS, {}, True),
    "a token": ("", {"incidents_token_file": "FOLDER/token"}, False),
}


@pytest.mark.parametrize("case", READERS)
def test_external_url_without_readers_is_warned_of_and_not_used(case: str, pki: Path, tmp_path: Path) -> None:
    text, more, is_used = READERS[case]
    (pki / "web.yml").write_text(text)
    (tmp_path / "token").write_text(TOKEN)
    keys = {"listen": "127.0.0.1", "external_url": URL, "web_config_file": str(pki / "web.yml"), **more}
    keys = {
        key: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value for key, value in keys.items()
    }
    assert usable_url(Http(**keys)) == (URL if is_used else "")  # type: ignore[arg-type]
    path = tmp_path / "hangwatch.toml"
    path.write_text("[http]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    checked = hangwatch("config", "--check", str(path))
    assert (checked.returncode, checked.stdout) == (0, f"{path}: ok\n")
    assert ("warning: [http] external_url: no browser may read incidents" in checked.stderr) is not is_used


@pytest.mark.parametrize(("cost", "is_warned_of"), [(12, False), (13, True), (14, True)])
def test_bcrypt_cost_above_12_is_warned_of(cost: int, is_warned_of: bool, tmp_path: Path) -> None:
    hashed = HASH.replace("$04$", f"${cost}$")
    (tmp_path / "web.yml").write_text(f"basic_auth_users:\n  alice: {hashed}\n")
    path = tmp_path / "hangwatch.toml"
    path.write_text(f'[http]\nlisten = "127.0.0.1"\nweb_config_file = "{tmp_path}/web.yml"\n')
    checked = hangwatch("config", "--check", str(path))
    assert (checked.returncode, checked.stdout) == (0, f"{path}: ok\n")
    warning = f"basic_auth_users.alice: bcrypt cost {cost}: "
    assert (warning in checked.stderr and "`htpasswd -nBC 10 alice`" in checked.stderr) is is_warned_of
    assert hashed not in checked.stderr


def test_the_list_of_a_store_that_cannot_be_read_is_empty(tmp_path: Path, pki: Path) -> None:
    (tmp_path / "incidents").write_text("no folder")
    with secured(Store(tmp_path), USERS, pki) as port:
        status, body = get(port, "/incidents", **basic())
        assert (status, json.loads(body)["incidents"]) == (200, [])


def test_status_at_a_port_with_credentials_says_what_to_type(kept: Store, pki: Path, tmp_path: Path) -> None:
    path = tmp_path / "hangwatch.toml"
    for text, says in ((USERS, "requires credentials: run this command on its node"), (TLS, "does not respond at")):
        with secured(kept, text, pki) as port:
            path.write_text(f'[http]\nlisten = "127.0.0.1"\nport = {port}\n[socket]\npath = "{tmp_path}/none"\n')
            refused("status", "--url", f"http://127.0.0.1:{port}", says=says)
            refused(
                "status", "--config", str(path), says="nor over the user socket: the socket of the daemon is missing"
            )
