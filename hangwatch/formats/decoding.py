"""Bytes and texts -> values of a type, in any thread.

msgspec 0.22 is not safe there: while one thread prepares a type that it sees for the first time, another one finds it
half prepared, and the process dies of a segmentation fault. So types are prepared under one lock, and all who decode
into a type of ours go through here (ruff's banned-api sees to it).
"""

from __future__ import annotations

import threading
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_PREPARING = threading.Lock()
_PREPARED: dict[Any, msgspec.json.Decoder[Any]] = {}


@overload
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder(kind: UnionType) -> msgspec.json.Decoder[Any]: ...
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """What decodes JSON into values of this type; made once."""
    found = _PREPARED.get(kind)
    if found is None:
        with _PREPARING:
            found = _PREPARED[kind] = msgspec.json.Decoder(kind)
    return found


@overload
def json(content: bytes | bytearray | str | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def json(content: bytes | bytearray | str | msgspec.Raw, kind: UnionType) -> Any: ...
def json(content: bytes | bytearray | str | msgspec.Raw, kind: Any) -> Any:
    """JSON as a value of this type. Raises msgspec.DecodeError (a ValidationError is one) and RecursionError."""
    return decoder(kind).decode(content)


def plain(content: bytes | str) -> object:
    """JSON as lists, dictionaries, texts and numbers. Raises msgspec.DecodeError and RecursionError."""
    return msgspec.json.decode(content)


def toml(text: str, kind: type[T]) -> T:
    """TOML as a value of this type. Raises msgspec.DecodeError."""
    with _PREPARING:
        return msgspec.toml.decode(text, type=kind)


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """Plain lists, dictionaries and so on as a value of this type. Raises msgspec.ValidationError."""
    with _PREPARING:
        return msgspec.convert(value, kind, strict=strict)
