"""Conversion of plain values, from a TOML or YAML file, to structs. All values that do not fit are found. Pure."""

from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from hangwatch.formats import decoding


class Misfit(NamedTuple):
    """A value that does not fit its type, or a key that the struct `owner` does not have.

    `keys` is the path to it; an item of a list is "[0]". `problem` is msgspec's message; "" for an unknown key.
    """

    keys: tuple[str, ...]
    problem: str
    hint: Any = None
    owner: Any = None


def read(value: object, hint: Any, keys: tuple[str, ...], misfits: list[Misfit], outer_hint: Any = None) -> Any:
    """Convert a value to the type `hint`; without the keys that do not fit, which are added to `misfits`.

    Return msgspec.UNSET if nothing fits. Of a list, only the first misfit is added. It is reported with `outer_hint`.
    """
    kind, count = plain_type(hint), len(misfits)
    if isinstance(value, dict) and is_struct(kind):
        return _read_struct(value, kind, keys, misfits)
    if isinstance(value, dict) and get_origin(kind) is dict:
        items = {key: read(inner, get_args(kind)[1], (*keys, key), misfits) for key, inner in value.items()}
        return {key: item for key, item in items.items() if item is not msgspec.UNSET}
    for number, item in enumerate(value if isinstance(value, list) and get_origin(kind) is tuple else ()):
        read(item, get_args(kind)[0], (*keys, f"[{number}]"), misfits, hint)
        if len(misfits) > count:
            del misfits[count + 1 :]
            return msgspec.UNSET
    try:
        if isinstance(value, str) and "\0" in value:
            raise msgspec.ValidationError("must not contain a NUL character")
        return decoding.convert(value, hint)
    except msgspec.ValidationError as error:
        misfits.append(Misfit(keys, str(error), outer_hint or hint))
        return msgspec.UNSET


def _read_struct(table: dict[str, object], kind: Any, keys: tuple[str, ...], misfits: list[Misfit]) -> Any:
    hints, values = get_type_hints(kind, include_extras=True), {}
    for key, value in table.items():
        if key in hints:
            values[key] = read(value, hints[key], (*keys, key), misfits)
        else:
            misfits.append(Misfit((*keys, key), "", owner=kind))
    fitting = {key: value for key, value in values.items() if value is not msgspec.UNSET}
    absent = [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in fitting]
    misfits += [Misfit(keys, f"Object missing required field `{name}`") for name in absent if name not in table]
    return msgspec.UNSET if absent else kind(**fitting)


def plain_type(hint: Any) -> Any:
    """Return a type without its limits, and without None."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return next(part for part in get_args(hint) if part is not NoneType) if isinstance(hint, UnionType) else hint


def is_struct(kind: object) -> bool:
    """True for a struct, which is a section of a file."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
