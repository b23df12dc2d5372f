"""What the system refuses of a store, said with what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hangwatch.formats.incident_file import StoreError, remedy
from hangwatch.store import durable


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the system's error into a StoreError that says what to do."""
    try:
        yield
    except durable.UnsafeFolderError as error:
        raise StoreError(str(error)) from None
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        raise StoreError(f"{path}: incidents cannot be written: {what}\n  {remedy(error.errno)}") from None
