"""Conversion of file errors to StoreErrors with a remedy."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hangwatch.formats.incident_file import StoreError, write_remedy
from hangwatch.store import durable


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to a StoreError, which names `path` and the remedy."""
    try:
        yield
    except durable.UnsafeFolderError as error:
        raise StoreError(str(error)) from None
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        raise StoreError(f"{path}: incidents cannot be written: {what}\n  {write_remedy(error.errno)}") from None
