"""The file `silences.json` in the state directory: the silences that must survive a restart of the daemon."""

import errno
import threading
from pathlib import Path

import msgspec

from hangwatch.formats import bounded_read, decoding
from hangwatch.formats.incident_file import NO_LINK, StoreError
from hangwatch.model import PageSilence
from hangwatch.state.board import Board
from hangwatch.store import durable
from hangwatch.store.durable import explain_errors

SILENCE_FILE = "silences.json"
MOST_BYTES = 16 << 20


class SilenceFile:
    """The file of silences in the state directory `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writing = threading.Lock()

    def write(self, board: Board) -> None:
        """Replace the file by the present silences of the board. Raises StoreError."""
        with self._writing, explain_errors(self._root / SILENCE_FILE), durable.folder(self._root) as root:
            durable.replace_file(root, SILENCE_FILE, msgspec.json.encode(tuple(board.snapshot.silences.values())))

    def read(self) -> tuple[PageSilence, ...]:
        """Return the silences in the file; none if there is no file. Raises StoreError."""
        path = self._root / SILENCE_FILE
        try:
            return decoding.decode_json(bounded_read.read(path, MOST_BYTES, flags=NO_LINK), tuple[PageSilence, ...])
        except bounded_read.FileError as error:
            if error.errno == errno.ENOENT:
                return ()
            raise StoreError(f"{error}\n  silences of an earlier daemon are not continued") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise StoreError(f"{path}: {error}\n  silences of an earlier daemon are not continued") from None
