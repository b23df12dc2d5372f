"""Pages that a thread makes on request. Requests that arrive while it makes a page share that page."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from types import MappingProxyType

from hangwatch.web.listener import Answer

LEAST_KEPT_SECONDS = 0.25  # a page is kept at least this long


class Page:
    """A page that is made on request. Requests that arrive while it is made share it.

    The page is kept for as long as it took to make it, and at least `LEAST_KEPT_SECONDS`. So a flood of requests costs
    at most half of one core, and slow clients keep few versions in memory.
    """

    def __init__(
        self,
        content_type: str,
        make: Callable[[], bytes],
        pool: ThreadPoolExecutor,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._content_type, self._make, self._pool, self._headers = content_type, make, pool, headers
        self._making: asyncio.Future[bytes] | None = None
        self._kept_until = 0.0

    async def get(self) -> Answer:
        """Return the page. If the request is cancelled, the thread still completes the page."""
        if self._making is None or (self._making.done() and time.monotonic() >= self._kept_until):
            self._making = asyncio.get_running_loop().run_in_executor(self._pool, self._timed)
        return Answer(HTTPStatus.OK, self._content_type, await asyncio.shield(self._making), self._headers)

    def _timed(self) -> bytes:
        began = time.monotonic()
        try:
            return self._make()
        finally:
            now = time.monotonic()
            self._kept_until = now + max(LEAST_KEPT_SECONDS, now - began)
