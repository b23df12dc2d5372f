"""The incidents of this node over the network: their list, and of each its files, sent as they are read."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from hangwatch.fleet import sighting
from hangwatch.formats import bounded_read, incident_file
from hangwatch.formats.incident_file import INCIDENT_FILE
from hangwatch.formats.incident_file import Incidents as Listed
from hangwatch.web.cached_page import Page
from hangwatch.web.listener import Answer, text

PIECE_BYTES = 64 << 10
JSON = "application/json"
FILES = {
    "report.html": "text/html; charset=utf-8",
    "report.txt": "text/plain; charset=utf-8",
    INCIDENT_FILE: JSON,
}
GROUPED = "grouped.json"
LIST_VERSION = 1
_PATH = re.compile(r"/incidents/([^/]+)(?:/([^/]*))?")
_MISSING = text(HTTPStatus.NOT_FOUND, "no such incident")


class Incidents(Protocol):
    """What is needed of the store."""

    def open_file(self, incident_id: str, name: str) -> BinaryIO | None:
        """One file of one incident, None where there is no such file."""

    def summaries(self) -> tuple[incident_file.Summary, ...]:
        """All incidents, newest first. Raises StoreError."""


class IncidentPages:
    """Answers to who may see incidents. `reading` is where a store on a dead mount blocks, and nothing else."""

    def __init__(self, incidents: Incidents, reading: ThreadPoolExecutor) -> None:
        self._incidents, self._reading = incidents, reading
        self._list = Page(JSON, self._listed, reading)

    async def answer(self, path: str) -> Answer:
        """/incidents is the list; /incidents/ID/NAME one file, grouped.json what merging needs of it."""
        if path in ("/incidents", "/incidents/"):
            return await self._list.get()
        asked = _PATH.fullmatch(path)
        if asked is None:
            return _MISSING
        incident_id, name = asked[1], asked[2] or "report.html"
        loop = asyncio.get_running_loop()
        if name == GROUPED:
            found = await loop.run_in_executor(self._reading, self._grouped, incident_id)
            return Answer(HTTPStatus.OK, JSON, found) if found is not None else _MISSING
        if name not in FILES:
            return _MISSING
        file = await loop.run_in_executor(self._reading, self._incidents.open_file, incident_id, name)
        if file is None:
            return _MISSING
        size_bytes = os.fstat(file.fileno()).st_size
        pieces = _Pieces(file, size_bytes, self._reading)
        if size_bytes > incident_file.MAX_INCIDENT_BYTES:
            await pieces.aclose()
            return text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the file is too large to be sent")
        return Answer(HTTPStatus.OK, FILES[name], b"", pieces=pieces, size_bytes=size_bytes)

    def _listed(self) -> bytes:
        try:
            return msgspec.json.encode(Listed(schema_version=LIST_VERSION, incidents=self._incidents.summaries()))
        except incident_file.StoreError:  # its message names paths
            return msgspec.json.encode(Listed(schema_version=LIST_VERSION, incidents=()))

    def _grouped(self, incident_id: str) -> bytes | None:
        """As `hangwatch dump --json --grouped` prints it: a sixth of the incident."""
        file = self._incidents.open_file(incident_id, INCIDENT_FILE)
        if file is None:
            return None
        try:
            with file:
                found = sighting.read(Path(INCIDENT_FILE), file)
        except (incident_file.StoreError, bounded_read.FileError):
            return None
        return msgspec.json.encode(msgspec.structs.replace(found, printed_unix_seconds=time.time()))


class _Pieces:
    """An open file, as much of it as was there when it was asked for."""

    def __init__(self, file: BinaryIO, size_bytes: int, reading: ThreadPoolExecutor) -> None:
        self._file, self._left, self._reading = file, size_bytes, reading

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        piece = await loop.run_in_executor(self._reading, self._file.read, min(PIECE_BYTES, self._left))
        if not piece:
            raise OSError("the file has become shorter")
        self._left -= len(piece)
        return piece

    async def aclose(self) -> None:
        self._file.close()
