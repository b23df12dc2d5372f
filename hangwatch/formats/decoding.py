"""Decoding of JSON, TOML and plain values to typed values, safe in any thread.

msgspec 0.22 crashes when two threads prepare the same type at the same time: one thread uses the incomplete type,
and the process dies of a segmentation fault. So types are prepared under one lock. No other module may decode to a
type of hangwatch (ruff's banned-api).
"""

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
    """Return the JSON decoder for this type. Each decoder is made once."""
    prepared = _PREPARED.get(kind)
    if prepared is None:
        with _PREPARING:
            prepared = _PREPARED[kind] = msgspec.json.Decoder(kind)
    return prepared


@overload
def decode_json(content: bytes | bytearray | str | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_json(content: bytes | bytearray | str | msgspec.Raw, kind: UnionType) -> Any: ...
def decode_json(content: bytes | bytearray | str | msgspec.Raw, kind: Any) -> Any:
    """Decode JSON to a value of this type. Raises msgspec.DecodeError and RecursionError."""
    return decoder(kind).decode(content)


def decode_plain_json(content: bytes | str) -> object:
    """Decode JSON to lists, dictionaries, texts and numbers. Raises msgspec.DecodeError and RecursionError."""
    return msgspec.json.decode(content)


def decode_toml(text: str, kind: type[T]) -> T:
    """Decode TOML to a value of this type. Raises msgspec.DecodeError."""
    with _PREPARING:
        return msgspec.toml.decode(text, type=kind)


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """Convert plain lists, dictionaries, texts and numbers to a value of this type. Raises msgspec.ValidationError."""
    with _PREPARING:
        return msgspec.convert(value, kind, strict=strict)
