"""Passwords against hashes of bcrypt, which are slow on purpose: who asks may not slow the node.

A pair that was found right is known by a keyed digest from then on, so that a scrape costs no hash. All others wait in
one queue and are hashed by one thread, which rests nine times as long as it has used a core: a stranger costs a tenth
of a core, however many tries he sends; who would have to wait for long is told so. An address has one try in the queue
at a time, so that one alone does not keep others out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import bcrypt

MOST_WAITING = 8
LONGEST_WAIT_SECONDS = 4.0  # then 429: an answer has ten seconds in all
SHARE_OF_A_CORE = 0.1
WRONG_KEPT = 256  # so that a scraper with an old password costs one hash, not one each scrape
COSTLY = 12  # above it each try takes half a second of CPU or more
MOST_COST = 14  # a second of CPU, by bcrypt's doubling
MOST_BYTES = 72  # bcrypt reads no more of a password; Go's cuts it there, too
_NOBODY = "." * 53  # salt and hash of nobody's password


class Answer(Enum):
    """What is known of a user and a password."""

    RIGHT = "right"
    WRONG = "wrong"
    BUSY = "busy"


class Passwords:
    """The users of one configuration: the bcrypt hash of each. `check` is for one event loop."""

    def __init__(self, hashes: Mapping[str, str], before: Passwords | None = None) -> None:
        """Who was known `before` stays so, where the hash is the same."""
        self._hashes = {user: hashed.encode() for user, hashed in hashes.items()}
        cost = max((cost_of(hashed) or 0 for hashed in hashes.values()), default=0)
        self._nobody = f"$2b${max(cost, 4):02d}${_NOBODY}".encode()
        self._key: bytes = secrets.token_bytes(32) if before is None else before._key
        self._right: dict[str, bytes] = {} if before is None else before._still_right(self._hashes)
        self._wrong: dict[bytes, None] = {}  # the oldest first
        self._trying: dict[bytes, asyncio.Task[bool]] = {}
        self._addresses: set[str] = set()
        self._turn = asyncio.Lock()
        self._rested_at = 0.0
        self._hashing = ThreadPoolExecutor(1, "http-passwords")

    async def check(self, user: str, password: bytes, address: str) -> Answer:
        """Whether this is the user's password; an unknown user takes as long as the one whose hash is the dearest."""
        digest = hmac.digest(self._key, b"%d:%b%b" % (len(user), user.encode(), password), hashlib.sha256)
        if hmac.compare_digest(self._right.get(user, b""), digest):
            return Answer.RIGHT
        if digest in self._wrong:
            return Answer.WRONG
        trying = self._trying.get(digest)
        if trying is None:
            place = _place(address)
            rests_for = self._rested_at - time.monotonic()
            if place in self._addresses or len(self._addresses) >= MOST_WAITING or rests_for > LONGEST_WAIT_SECONDS:
                return Answer.BUSY
            self._addresses.add(place)
            trying = asyncio.get_running_loop().create_task(self._try(user, password, digest, place))
            self._trying[digest] = trying
        return Answer.RIGHT if await asyncio.shield(trying) else Answer.WRONG

    def stop(self) -> None:
        """Hash no more."""
        self._hashing.shutdown(wait=False, cancel_futures=True)

    async def _try(self, user: str, password: bytes, digest: bytes, place: str) -> bool:
        try:
            async with self._turn:
                await asyncio.sleep(max(0.0, self._rested_at - time.monotonic()))
                loop = asyncio.get_running_loop()
                is_right, cpu_seconds = await loop.run_in_executor(self._hashing, self._timed, user, password)
                self._rested_at = time.monotonic() + cpu_seconds * (1 / SHARE_OF_A_CORE - 1)
        finally:
            self._addresses.discard(place)
            self._trying.pop(digest, None)
        if is_right:
            self._right[user] = digest
        else:
            self._wrong[digest] = None
            if len(self._wrong) > WRONG_KEPT:
                del self._wrong[next(iter(self._wrong))]
        return is_right

    def _still_right(self, hashes: Mapping[str, bytes]) -> dict[str, bytes]:
        return {user: known for user, known in self._right.items() if hashes.get(user) == self._hashes[user]}

    def _timed(self, user: str, password: bytes) -> tuple[bool, float]:
        """With the CPU seconds that it took: on a node that is busy, time alone is far longer."""
        began = time.thread_time()
        return self._is_right(user, password), time.thread_time() - began

    def _is_right(self, user: str, password: bytes) -> bool:
        """Hash in any case."""
        hashed = self._hashes.get(user)
        try:
            fits = bcrypt.checkpw(password[:MOST_BYTES], hashed or self._nobody)
        except ValueError:
            return False
        return fits and hashed is not None


def cost_of(hashed: str) -> int | None:
    """The cost of a hash of bcrypt, None where it is none."""
    parts = hashed.split("$")
    if len(parts) != 4 or parts[1] not in ("2a", "2b", "2y") or len(parts[3]) != 53 or not parts[2].isdigit():
        return None
    if not hashed.isascii() or not all(one.isalnum() or one in "./" for one in parts[3]):
        return None
    cost = int(parts[2])
    return cost if 4 <= cost <= 31 and len(parts[2]) == 2 else None


def _place(address: str) -> str:
    """An address of IPv4, or the network of one of IPv6: who has one of these has 2^64. This node is one place."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if known.version == 6 and known.ipv4_mapped is not None:
        known = known.ipv4_mapped
    if known.is_loopback:
        return "loopback"
    return str(known if known.version == 4 else ipaddress.ip_network((known, 64), strict=False))
