"""The web configuration of Prometheus exporters: accepted settings, and errors with file, line and key."""

import os
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.formats import yaml_file
from hangwatch.web import auth, passwords, web_config
from tests.certificates import make_authority, make_certificate
from tests.conftest import load_table

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    ca = make_authority(folder, "ca")
    make_certificate(ca, folder, "node", "IP:127.0.0.1")
    return folder


def written(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    return path


TLS = "tls_server_config:\n  cert_file: node.pem\n  key_file: node-key.pem\n"
CLIENTS = f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"


def test_settings_of_exporters_are_accepted(folder: Path) -> None:
    path = written(
        folder,
        f"{CLIENTS}  client_allowed_sans: [prometheus.example, 10.0.0.1]\n"
        "  min_version: TLS12\n  max_version: TLS12\n  prefer_server_cipher_suites: false\n"
        "  cipher_suites:\n  - TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384\n  - TLS_AES_128_GCM_SHA256\n"
        f"http_server_config:\n  http2: false\nbasic_auth_users:\n  alice: {HASH}\n  123: {HASH}\n",
    )
    settings = web_config.load(path)
    assert settings.users == {"alice": HASH, "123": HASH}
    assert settings.allowed_sans == {"prometheus.example", "10.0.0.1"}
    assert settings.files == (path, folder / "node.pem", folder / "node-key.pem", folder / "ca.pem")
    assert settings.tls.verify_mode is ssl.CERT_REQUIRED
    assert settings.tls.maximum_version is ssl.TLSVersion.TLSv1_2
    of_tls12 = [one["name"] for one in settings.tls.get_ciphers() if one["protocol"] == "TLSv1.2"]
    assert of_tls12 == ["ECDHE-ECDSA-AES256-GCM-SHA384"]


def test_ciphers_exist_in_openssl() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    known = {one["name"] for one in context.get_ciphers()}
    assert set(web_config._CIPHERS.values()) - known == set()


def test_empty_file_is_the_default(folder: Path) -> None:
    settings = web_config.load(written(folder, "# nothing yet\n"))
    assert (settings.tls, settings.users, settings.verifies_clients) == (None, {}, False)


REFUSED = {
    **load_table("refused_web_configs.toml"),
    "too deep": ("a: " + "[" * 100 + "]" * 100, "is too large or nested too deeply"),
    "aliases": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)),
        "is too large or nested too deeply",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_setting_is_named_with_its_line(case: str, folder: Path) -> None:
    text, says = REFUSED[case]
    path = written(folder, text.replace("{tls}", TLS))
    with pytest.raises(yaml_file.YamlError) as refused:
        web_config.load(path)
    assert str(refused.value).startswith(f"{path}:")
    assert says in str(refused.value)
    assert HASH not in str(refused.value)


def test_missing_irregular_and_world_writable_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    irregular = "is not a regular file"
    for name, says in (("none", "No such file"), ("/dev/zero", irregular), ("fifo", irregular)):
        with pytest.raises(yaml_file.YamlError, match=says):
            web_config.load(tmp_path / name)
    (tmp_path / "web.yml").write_text("")
    (tmp_path / "web.yml").chmod(0o666)
    with pytest.raises(yaml_file.YamlError, match=r"all users may write this file.*chmod o-w"):
        web_config.load(tmp_path / "web.yml")


@given(st.text(max_size=200))
def test_any_text_is_settings_or_an_error_with_a_line(folder: Path, text: str) -> None:
    path = folder / "any.yml"
    path.write_text(text, errors="ignore")
    try:
        web_config.load(path)
    except yaml_file.YamlError as error:
        assert str(error).startswith(f"{path}:")


def test_fewer_requirements_are_weaker(folder: Path) -> None:
    users = f"basic_auth_users:\n  a: {HASH}\n"
    given_up = [
        (CLIENTS + users, CLIENTS),
        (CLIENTS + users, users),
        (users, TLS + users),
        (CLIENTS, TLS),
        (f"{CLIENTS}  client_allowed_sans: [a]\n", CLIENTS),
        (CLIENTS, CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")),
        (users, ""),
    ]
    for before, after in given_up:
        old, new = (web_config.load(written(folder, text)) for text in (before, after))
        assert new.is_weaker_than(old), after
        assert not old.is_weaker_than(old)


def test_certificate_names_are_read() -> None:
    certificate = {"subjectAltName": (("DNS", "a"), ("IP Address", "FE80:0:0:0:0:0:0:1"), ("URI", "spiffe://x"))}
    assert auth.subject_names(certificate) == {"a", "fe80::1", "spiffe://x"}
    assert auth.subject_names({}) == frozenset()


@pytest.mark.parametrize(
    ("hashed", "cost"),
    [(HASH, 10), (HASH.replace("$2y$10$", "$2b$04$"), 4), ("", None), ("$2y$1a$x", None)]
    + [(HASH.replace("$10$", f"${wrong}$"), None) for wrong in ("03", "32", "4", "²²")]
    + [(HASH.replace("$2y$", "$2x$"), None), (HASH[:-1] + "é", None), (HASH + "\n", None)],
)
def test_bcrypt_hashes_are_recognized(hashed: str, cost: int | None) -> None:
    assert passwords.cost_of(hashed) == cost
