"""Access control of the HTTP server, by password, client certificate or token.

Stacks show code and paths of users' jobs, so only authenticated clients may read incidents. If no users, client
certificates or token are configured, incidents are not served. The server reads the files of its rules again when they
change.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
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
BUSY_SECONDS = 5  # for the header Retry-After
OFF = "incidents are not served: set [http] web_config_file with users or client certificates, or incidents_token_file"

log = logging.getLogger(__name__)


class Rules(NamedTuple):
    """The requirements for clients: TLS, a client certificate with one of `allowed_sans`, and a password.

    `users` are bcrypt hashes by user name. If it is empty, no password is required. The rules were read from `files`.
    """

    tls: ssl.SSLContext | None = None
    users: Mapping[str, str] = {}
    allowed_sans: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()

    @property
    def verifies_clients(self) -> bool:
        """True if the server verifies client certificates."""
        return self.tls is not None and self.tls.verify_mode is not ssl.CERT_NONE

    def is_weaker_than(self, other: Rules) -> bool:
        """True if these rules lack a requirement of `other`, or turn TLS on or off, as a half-written file may do."""
        return (
            (self.tls is None) != (other.tls is None)
            or (bool(other.users) and not self.users)
            or (other.tls is not None and self.tls is not None and self.tls.verify_mode < other.tls.verify_mode)
            or (bool(other.allowed_sans) and not self.allowed_sans)
        )


class Admission:
    """The access rules in use. `refusal` applies them to a request.

    `read` returns the rules; it is called again when their files change. `use_tls` sets the TLS context of new
    connections.
    """

    def __init__(
        self,
        rules: Rules,
        read: Callable[[], Rules],
        *,
        token: bytes | None,
        use_tls: Callable[[ssl.SSLContext], None],
    ) -> None:
        self._rules, self._passwords = rules, _passwords(rules)
        self._read, self._use_tls = read, use_tls
        self._token = token
        self._seen = _files_state(rules.files)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._reload, name="http-reload", daemon=True)

    def start(self) -> None:
        """Start the thread that watches the files of the rules, if there are any."""
        if self._rules.files:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching the files, without waiting for a file system that does not respond."""
        self._stopping.set()
        if self._passwords is not None:
            self._passwords.stop()

    async def refusal(self, request: Request, *, is_of_incidents: bool) -> Answer | None:
        """Return the answer that refuses the request; None if the request is allowed."""
        rules, passwords = self._rules, self._passwords
        if rules.allowed_sans and rules.allowed_sans.isdisjoint(subject_names(request.certificate or {})):
            return text(HTTPStatus.FORBIDDEN, "the client certificate has none of the allowed names")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if is_of_incidents and scheme.lower() == "bearer" and self._token is not None:
            return None if hmac.compare_digest(given.strip().encode(), self._token) else self._unauthorized()
        if passwords is not None:
            return await self._of_user(passwords, given if scheme.lower() == "basic" else "", request.address)
        if not is_of_incidents:
            return None
        if rules.verifies_clients:
            return None if request.certificate else text(HTTPStatus.FORBIDDEN, "a client certificate is required")
        return self._unauthorized() if self._token is not None else text(HTTPStatus.NOT_FOUND, OFF)

    async def _of_user(self, passwords: Passwords, given: str, address: str) -> Answer | None:
        user, password = _user_and_password(given)
        if user is None:
            return self._unauthorized()
        answer = await passwords.check(user, password, address)
        if answer == "busy":
            busy = text(HTTPStatus.TOO_MANY_REQUESTS, "too many passwords are being tried")
            return busy._replace(headers={"Retry-After": str(BUSY_SECONDS)})
        return None if answer == "right" else self._unauthorized()

    def _unauthorized(self) -> Answer:
        """Return the answer 401 (Unauthorized). It names the authentication scheme that the server requires."""
        if self._passwords is not None:
            message, scheme = "a user and a password are required", 'Basic realm="hangwatch"'
        else:
            message, scheme = "a bearer token is required", 'Bearer realm="hangwatch incidents"'
        return text(HTTPStatus.UNAUTHORIZED, message)._replace(headers={"WWW-Authenticate": scheme})

    def _reload(self) -> None:
        while not self._stopping.wait(RELOAD_SECONDS):
            now = _files_state(self._rules.files)
            if now != self._seen:
                self._seen = now
                self._replace_rules(self._read)

    def _replace_rules(self, read: Callable[[], Rules]) -> None:
        """Use the rules that `read` returns. If they are unusable or weaker, log that and keep the previous rules."""
        name = str(self._rules.files[0])
        try:
            rules = read()
        except Exception as error:  # the thread must continue
            log.error("%s has changed and cannot be used; the previous rules stay in force: %s", name, error)
            return
        if rules.is_weaker_than(self._rules):
            log.error(
                "%s has weaker rules than before, or turns TLS on: restart hangwatch to apply it; "
                "the previous rules stay in force",
                name,
            )
            return
        if rules.users != self._rules.users:
            self._passwords = _passwords(rules, self._passwords)
        if rules.tls is not None:
            self._use_tls(rules.tls)
        self._rules, self._seen = rules, _files_state(rules.files)
        log.info("%s has changed and was read again", name)


def subject_names(certificate: Mapping[str, Any]) -> frozenset[str]:
    """Return the subject alternative names of a certificate, which `ssl.SSLSocket.getpeercert` returned."""
    return frozenset(
        _address(name) if kind == "IP Address" else name for kind, name in certificate.get("subjectAltName", ())
    )


def _address(shown: str) -> str:
    """Return an IP address in its short form, and any other text unchanged. OpenSSL writes IPv6 addresses in full."""
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
    """Decode basic authentication (RFC 7617) to user and password. The user is None if it is invalid."""
    try:
        user, colon, password = base64.b64decode(given.strip(), validate=True).partition(b":")
        return (user.decode() if colon else None), password
    except (binascii.Error, ValueError):
        return None, b""


def _files_state(files: tuple[Path, ...]) -> dict[Path, tuple[int, int, int]]:
    """Return a value that is different after a change of one of the files."""
    states = {}
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            states[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return states
