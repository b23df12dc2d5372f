"""Password checks with bcrypt hashes. They are slow by design, but must not slow the node down.

A correct password is stored as a keyed digest, so that the next scrape needs no hashing. All other attempts wait in one
queue for one thread. After each attempt the thread pauses for nine times its CPU time, so attempts cost at most a tenth
of a core. If the queue is too long, the answer is "busy". An address has only one attempt in the queue, so it cannot
block others.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

from hangwatch.model import is_loopback
from hangwatch.web.connection_limits import caller_at

MOST_WAITING = 8
# If the wait were longer, the answer is "busy", because an answer has ten seconds in total
LONGEST_WAIT_SECONDS = 4.0
SHARE_OF_A_CORE = 0.1
# Wrong passwords kept, so that a scraper with an old password costs one hash, not one per scrape
WRONG_KEPT = 256
COSTLY = 12  # above this cost each attempt takes at least half a second of CPU
MOST_COST = 14  # about a second of CPU
MOST_BYTES = 72  # bcrypt uses only these bytes of a password; Go also cuts it here
_BCRYPT = re.compile(r"\$2[aby]\$([0-9]{2})\$[A-Za-z0-9./]{53}")
_NO_PASSWORD = "." * 53  # salt and hash that no password has


Answer: TypeAlias = Literal["right", "wrong", "busy"]
"""The result of a password check."""


class Passwords:
    """The users of one configuration with their bcrypt hashes. Use `check` in only one event loop."""

    def __init__(self, hashes: Mapping[str, str], before: Passwords | None = None) -> None:
        """Store the users. Keep the correct passwords that `before` has stored, for users with an unchanged hash.

        `before` holds the users of the previous configuration.
        """
        import bcrypt  # only a daemon with users needs it

        self._check_hash = bcrypt.checkpw
        self._hashes = {user: hashed.encode() for user, hashed in hashes.items()}
        cost = max((cost_of(hashed) or 0 for hashed in hashes.values()), default=0)
        self._unknown_user = f"$2b${max(cost, 4):02d}${_NO_PASSWORD}".encode()
        self._key: bytes = secrets.token_bytes(32) if before is None else before._key
        self._right: dict[str, bytes] = {}
        if before is not None:
            unchanged = {user for user, hashed in before._hashes.items() if self._hashes.get(user) == hashed}
            self._right = {user: digest for user, digest in before._right.items() if user in unchanged}
        self._wrong: dict[bytes, None] = {}  # the oldest first
        self._trying: dict[bytes, asyncio.Task[bool]] = {}
        self._addresses: set[str] = set()
        self._turn = asyncio.Lock()
        self._rested_at = 0.0
        self._hashing = ThreadPoolExecutor(1, "http-passwords")

    async def check(self, user: str, password: bytes, address: str) -> Answer:
        """Check a user's password. The check of an unknown user takes as long as that of the most expensive hash."""
        digest = hmac.digest(self._key, b"%d:%b%b" % (len(user), user.encode(), password), hashlib.sha256)
        if hmac.compare_digest(self._right.get(user, b""), digest):
            return "right"
        if digest in self._wrong:
            return "wrong"
        trying = self._trying.get(digest)
        if trying is None:
            # An address has the key of its caller in the queue. All loopback addresses have one key.
            caller = str(caller_at(address))
            queue_key = "loopback" if is_loopback(address) or is_loopback(caller) else caller
            rests_for = self._rested_at - time.monotonic()
            if queue_key in self._addresses or len(self._addresses) >= MOST_WAITING or rests_for > LONGEST_WAIT_SECONDS:
                return "busy"
            self._addresses.add(queue_key)
            trying = asyncio.get_running_loop().create_task(self._try(user, password, digest, queue_key))
            self._trying[digest] = trying
        return "right" if await asyncio.shield(trying) else "wrong"

    def stop(self) -> None:
        """Cancel waiting attempts."""
        self._hashing.shutdown(wait=False, cancel_futures=True)

    async def _try(self, user: str, password: bytes, digest: bytes, queue_key: str) -> bool:
        try:
            async with self._turn:
                await asyncio.sleep(max(0.0, self._rested_at - time.monotonic()))
                loop = asyncio.get_running_loop()
                is_right, cpu_seconds = await loop.run_in_executor(self._hashing, self._timed, user, password)
                self._rested_at = time.monotonic() + cpu_seconds * (1 / SHARE_OF_A_CORE - 1)
        finally:
            self._addresses.discard(queue_key)
            self._trying.pop(digest, None)
        if is_right:
            self._right[user] = digest
        else:
            self._wrong[digest] = None
            if len(self._wrong) > WRONG_KEPT:
                del self._wrong[next(iter(self._wrong))]
        return is_right

    def _timed(self, user: str, password: bytes) -> tuple[bool, float]:
        """Check a password. Return the result and the used CPU seconds. On a busy node more seconds elapse."""
        began = time.thread_time()
        return self._is_right(user, password), time.thread_time() - began

    def _is_right(self, user: str, password: bytes) -> bool:
        """Check a password. The password of an unknown user is hashed too, so that the time reveals nothing."""
        hashed = self._hashes.get(user)
        try:
            is_match = self._check_hash(password[:MOST_BYTES], hashed or self._unknown_user)
        except ValueError:
            return False
        return is_match and hashed is not None


def cost_of(hashed: str) -> int | None:
    """Return the cost of a bcrypt hash. None: the text is not a bcrypt hash."""
    match = _BCRYPT.fullmatch(hashed)
    cost = int(match[1]) if match else 0
    return cost if 4 <= cost <= 31 else None
