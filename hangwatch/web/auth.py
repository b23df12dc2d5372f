"""Who may ask for what over the network: by password, certificate of the client, token, or because nobody else can ask.

Stacks name code and paths of other people's jobs: incidents are served to those who have shown who they are, and to
nobody where nothing says who that is. The files that say so are read again when they change.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hangwatch.web.listener import Answer, Request, text

if TYPE_CHECKING:
    from hangwatch.web.passwords import Passwords

RELOAD_SECONDS = 5.0
BUSY_SECONDS = 5  # after which to try again
OFF = "incidents are not served: set [http] web_config_file with users or client certificates, or incidents_token_file"

log = logging.getLogger(__name__)


class Rules(NamedTuple):
    """What is asked of a client: TLS and whether with a certificate, with which names, and a user of `users`.

    `users` are bcrypt hashes by name; without any, nobody is asked for a password. `files` are what it was read from.
    """

    tls: ssl.SSLContext | None = None
    users: Mapping[str, str] = {}
    allowed_sans: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()

    @property
    def verifies_clients(self) -> bool:
        """Whether a client's certificate is verified, where it shows one."""
        return self.tls is not None and self.tls.verify_mode is not ssl.CERT_NONE

    def is_weaker_than(self, other: Rules) -> bool:
        """Whether they give up something that the others ask for: what a file half written looks like."""
        return (
            (self.tls is None) != (other.tls is None)
            or (bool(other.users) and not self.users)
            or (other.tls is not None and self.tls is not None and self.tls.verify_mode < other.tls.verify_mode)
            or (bool(other.allowed_sans) and not self.allowed_sans)
        )


class Admission:
    """The rules in force. `read` reads them again, `use_tls` takes the certificate of the connections from then on."""

    def __init__(
        self,
        rules: Rules,
        read: Callable[[], Rules],
        *,
        token: bytes | None,
        everybody_sees_incidents: bool,
        use_tls: Callable[[ssl.SSLContext], None],
    ) -> None:
        self._rules, self._passwords = rules, _passwords(rules)
        self._read, self._use_tls = read, use_tls
        self._token, self._everybody_sees_incidents = token, everybody_sees_incidents
        self._seen = _state(rules.files)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._reload, name="http-reload", daemon=True)

    def start(self) -> None:
        """Follow the files, where there are any."""
        if self._rules.files:
            self._thread.start()

    def stop(self) -> None:
        """Follow them no more; a file system that does not answer is not waited for."""
        self._stopping.set()
        if self._passwords is not None:
            self._passwords.stop()

    async def refusal(self, request: Request, *, is_of_incidents: bool) -> Answer | None:
        """The answer to who may not have what it asks for; None to who may."""
        rules, passwords = self._rules, self._passwords
        if rules.allowed_sans and rules.allowed_sans.isdisjoint(names_of(request.certificate or {})):
            return text(HTTPStatus.FORBIDDEN, "the client's certificate has none of the names that are allowed")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if is_of_incidents and scheme.lower() == "bearer" and self._token is not None:
            return None if hmac.compare_digest(given.strip().encode(), self._token) else self._unknown()
        if passwords is not None:
            return await self._of_user(passwords, given if scheme.lower() == "basic" else "", request.address)
        if not is_of_incidents or self._everybody_sees_incidents:
            return None
        if rules.verifies_clients:
            return None if request.certificate else text(HTTPStatus.FORBIDDEN, "a client certificate is needed")
        return self._unknown() if self._token is not None else text(HTTPStatus.NOT_FOUND, OFF)

    async def _of_user(self, passwords: Passwords, given: str, address: str) -> Answer | None:
        user, password = _user_and_password(given)
        if user is None:
            return self._unknown()
        answer = (await passwords.check(user, password, address)).value
        if answer == "busy":
            busy = text(HTTPStatus.TOO_MANY_REQUESTS, "too many passwords are being tried")
            return busy._replace(headers={"Retry-After": str(BUSY_SECONDS)})
        return None if answer == "right" else self._unknown()

    def _unknown(self) -> Answer:
        """401, and by what a client may say who it is."""
        asked = 'Basic realm="hangwatch"' if self._passwords is not None else 'Bearer realm="hangwatch incidents"'
        needed = "a user and a password are needed" if self._passwords is not None else "a bearer token is needed"
        return text(HTTPStatus.UNAUTHORIZED, needed)._replace(headers={"WWW-Authenticate": asked})

    def _reload(self) -> None:
        while not self._stopping.wait(RELOAD_SECONDS):
            now = _state(self._rules.files)
            if now != self._seen:
                self._seen = now
                self._take(self._read)

    def _take(self, read: Callable[[], Rules]) -> None:
        """Use what the files say now; where they cannot be used, or ask for less, the rules stay as they are."""
        named = str(self._rules.files[0])
        try:
            rules = read()
        except Exception as error:  # of a thread that goes on
            log.error("%s has changed and cannot be used, what it said before holds: %s", named, error)
            return
        if rules.is_weaker_than(self._rules):
            log.error(
                "%s asks for less than before, or turns TLS on: that takes a restart; what it said before holds", named
            )
            return
        if rules.users != self._rules.users:
            self._passwords = _passwords(rules, self._passwords)
        if rules.tls is not None:
            self._use_tls(rules.tls)
        self._rules, self._seen = rules, _state(rules.files)
        log.info("%s has changed and was read again", named)


def names_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """The subject alternative names of a certificate as `ssl.SSLSocket.getpeercert` gives it."""
    return frozenset(
        _address(name) if kind == "IP Address" else name for kind, name in certificate.get("subjectAltName", ())
    )


def _address(shown: str) -> str:
    """An address in its short form: OpenSSL writes those of IPv6 in full."""
    try:
        return str(ipaddress.ip_address(shown.strip()))
    except ValueError:
        return shown


def _passwords(rules: Rules, before: Passwords | None = None) -> Passwords | None:
    if not rules.users:
        return None
    from hangwatch.web.passwords import Passwords

    return Passwords(rules.users, before)


def _user_and_password(given: str) -> tuple[str | None, bytes]:
    """What the header of basic authentication holds (RFC 7617); None without a user."""
    try:
        user, colon, password = base64.b64decode(given.strip(), validate=True).partition(b":")
        return (user.decode() if colon else None), password
    except (binascii.Error, ValueError):
        return None, b""


def _state(files: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    """By what a change of files is seen."""
    return tuple(map(_state_of, files))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
