"""Reader for a pickle of plain values. It loads no classes and has limits of memory and time. Pure.

A pickle is a program: it may import and call anything, and a few bytes of it may create a huge value. So all its
opcodes are checked before the first one runs. Allowed are the opcodes that torch's pickler, or Python's, writes for
dicts, lists, texts, numbers and pairs of texts. Each opcode makes one value at most, and their number is limited.
Opcodes and their arguments: pickletools in Python's library; the output of torch:
torch/csrc/jit/serialization/pickler.cpp.
"""

import io
import pickle
import pickletools
from collections.abc import Iterator
from typing import NoReturn

from hangwatch import words

MOST_BYTES = 64 << 20
MOST_OPCODES = 4_000_000
_LONGEST_INTEGER_BYTES = 8

_ALLOWED = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK"),
        *("EMPTY_DICT", "EMPTY_LIST", "TUPLE2", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    }
)
_OPCODES = {ord(one.code): one for one in pickletools.opcodes}
_COUNT_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4U: 4}
_COUNTED = frozenset(code for code, one in _OPCODES.items() if one.arg is not None and one.arg.n in _COUNT_BYTES)
_WIDTHS = {
    code: 0 if one.arg is None else _COUNT_BYTES.get(one.arg.n, one.arg.n)
    for code, one in _OPCODES.items()
    if one.name in _ALLOWED
}
"""The number of bytes after each opcode. After an opcode in `_COUNTED`, these bytes are the number of further bytes."""

_CODES = {one.name: code for code, one in _OPCODES.items()}
_TEXTS = frozenset({_CODES["BINUNICODE"], _CODES["SHORT_BINUNICODE"]})
_PUTS = frozenset({_CODES["BINPUT"], _CODES["LONG_BINPUT"], _CODES["MEMOIZE"]})
_GETS = frozenset({_CODES["BINGET"], _CODES["LONG_BINGET"]})
_STOP, _LONG1, _TUPLE2, _MEMOIZE = (_CODES[name] for name in ("STOP", "LONG1", "TUPLE2", "MEMOIZE"))


def load_plain_values(content: bytes) -> object:
    """Return the value of a pickle of dicts, lists, pairs of texts, texts, numbers, booleans and None.

    Lists and dicts may contain each other, and several may contain the same one. So the caller must limit the depth
    that it reads. Raises ValueError with the reason for any other pickle, before any object is built.
    """
    _check_opcodes(content)
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise ValueError(f"is not a complete pickle: {words.elided(str(error), 128)}") from None


def _check_opcodes(content: bytes) -> None:
    """Raise ValueError if an opcode is not allowed or too large, if there are too many, or if the pickle ends early.

    Only pairs of texts are allowed as tuples, because the hash of a tuple within a tuple is recursive C code.
    """
    texts_on_top = 0
    memoized: set[int] = set()
    texts: set[int] = set()  # numbers of the memo entries that are texts
    for code, argument in _opcodes(content):
        if code in _TEXTS:
            texts_on_top += 1
        elif code in _PUTS:
            number = len(memoized) if code == _MEMOIZE else int.from_bytes(argument, "little")
            if number > MOST_OPCODES:
                raise ValueError(f"needs {number:,} places in its memo")
            memoized.add(number)
            (texts.add if texts_on_top else texts.discard)(number)
        elif code in _GETS:
            texts_on_top = texts_on_top + 1 if int.from_bytes(argument, "little") in texts else 0
        elif code == _TUPLE2 and texts_on_top < 2:
            raise ValueError("holds a tuple that is not a pair of texts")
        else:
            texts_on_top = 0


def _opcodes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each opcode up to the last one with its argument. For a text, yield only its length. Raises ValueError."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES >> 20} MiB")
    place, opcodes_left = 0, MOST_OPCODES
    while place < len(content):
        code = content[place]
        if code not in _WIDTHS:
            opcode = _OPCODES.get(code)
            raise ValueError(f"may do more than contain values: opcode {opcode.name if opcode else hex(code)}")
        argument = content[place + 1 : place + 1 + _WIDTHS[code]]
        place += 1 + _WIDTHS[code]
        if code in _COUNTED:
            size = int.from_bytes(argument, "little")
            if code == _LONG1 and size > _LONGEST_INTEGER_BYTES:
                raise ValueError(f"holds an integer of {size} bytes")
            place += size
        opcodes_left -= 1
        if opcodes_left < 0:
            raise ValueError(f"has more than {MOST_OPCODES:,} opcodes")
        if code == _STOP:
            return
        yield code, argument
    raise ValueError("is not a complete pickle: it ends early")


class _Unpickler(pickle.Unpickler):
    """An unpickler that refuses all classes. No allowed opcode can request one, so this is a second check."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"names {module}.{name}")

    def persistent_load(self, _: object) -> NoReturn:
        raise ValueError("refers to an object outside of the file")
