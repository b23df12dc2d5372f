"""The HTTP pages of incidents: the list of incidents, and the files of each incident."""

import asyncio
import os
import re
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import BinaryIO

import msgspec

from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import INCIDENT_FILE
from hangwatch.formats.incident_file import Incidents as Listed
from hangwatch.store import Store
from hangwatch.web.cached_page import Page
from hangwatch.web.listener import Answer, OpenFile, text

JSON = "application/json"
FILES = {
    "report.html": "text/html; charset=utf-8",
    "report.txt": "text/plain; charset=utf-8",
    "event.json": JSON,
    INCIDENT_FILE: JSON,
}
LIST_VERSION = 1
_PATH = re.compile(r"/incidents/([^/]+)(?:/([^/]*))?")
_MISSING = text(HTTPStatus.NOT_FOUND, "no such incident")


class IncidentPages:
    """The pages for clients that may read incidents. A store on a dead mount blocks only the threads in `reading`.

    `uid` is a user who may read only the incidents of the user's own jobs; 0: all incidents are readable.
    """

    def __init__(self, incidents: Store, reading: ThreadPoolExecutor, uid: int = 0) -> None:
        self._incidents, self._reading, self._uid = incidents, reading, uid
        self._list = Page(JSON, self._listed, reading)

    async def answer(self, path: str) -> Answer:
        """Return the answer to /incidents or /incidents/ID/NAME. NAME is a file of the incident."""
        if path in ("/incidents", "/incidents/"):
            return await self._list.get()
        match = _PATH.fullmatch(path)
        if match is None:
            return _MISSING
        incident_id, name = match[1], match[2] or "report.html"
        loop = asyncio.get_running_loop()
        if name not in FILES:
            return _MISSING
        file = await loop.run_in_executor(self._reading, self._open, incident_id, name)
        if file is None:
            return _MISSING
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > incident_file.MAX_INCIDENT_BYTES:
            file.close()
            return text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the file is too large")
        return Answer(HTTPStatus.OK, FILES[name], b"", file=OpenFile(file, size_bytes, self._reading))

    def _open(self, incident_id: str, name: str) -> BinaryIO | None:
        """Open a file of an incident; None if there is no such file, or if this user may not read it."""
        is_readable = self._uid == 0 or self._incidents.is_listed(incident_id, self._uid)
        return self._incidents.open_file(incident_id, name) if is_readable else None

    def _listed(self) -> bytes:
        try:
            summaries = self._incidents.summaries(self._uid or None)
        except incident_file.StoreError:  # the message is not sent, because it contains paths
            summaries = ()
        return msgspec.json.encode(Listed(schema_version=LIST_VERSION, incidents=summaries))
