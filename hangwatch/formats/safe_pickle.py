"""Reader for a pickle of plain values. It loads no classes and has limits of memory and time. Pure.

A pickle is a program: it may import and call anything, and a few bytes of it may create a huge value. So this is an
interpreter that knows only the opcodes that torch's pickler, or Python's, writes for dicts, lists, texts, numbers and
pairs of texts. Each opcode makes one value at most, and their number is limited.
Opcodes and their arguments: pickletools in Python's library; the output of torch:
torch/csrc/jit/serialization/pickler.cpp.
"""

import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any

from hangwatch import words

_MOST_OPCODES = 4_000_000
_LONGEST_INTEGER_BYTES = 8  # many keys with one hash make a dict slow, and the hash of a longer integer can be chosen


_VALUES: dict[str, Callable[[bytes], object]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "BININT": lambda argument: int.from_bytes(argument, "little", signed=True),
    "BININT1": lambda argument: int.from_bytes(argument, "little"),
    "BININT2": lambda argument: int.from_bytes(argument, "little"),
    "LONG1": lambda argument: int.from_bytes(argument, "little", signed=True),
    "BINFLOAT": lambda argument: struct.unpack(">d", argument)[0],
    "BINUNICODE": lambda argument: argument.decode("utf-8", "surrogatepass"),
    "SHORT_BINUNICODE": lambda argument: argument.decode("utf-8", "surrogatepass"),
}
"""The opcodes that push a value, with the function that makes it from the bytes after the opcode."""

_COUNT_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4U: 4}
_OPCODES = {
    ord(opcode.code): (opcode.name, _COUNT_BYTES.get(size, size), size in _COUNT_BYTES)
    for opcode in pickletools.opcodes
    for size in ([0] if opcode.arg is None else [opcode.arg.n])
}
"""The name of each opcode, the number of bytes after it, and True if these bytes are the number of further bytes."""


def load_plain_values(content: bytes) -> object:
    """Return the value of a pickle of dicts, lists, pairs of texts, texts, numbers, booleans and None.

    Lists and dicts may contain each other, and several may contain the same one. So the caller must limit the depth
    that it reads. Raises ValueError with the reason for any other pickle.
    """
    try:
        return _run(content)
    except (AttributeError, LookupError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"is not a complete pickle: {words.elided(str(error), 128)}") from None


def _run(content: bytes) -> object:
    stack: list[Any] = []
    outer_stacks: list[list[Any]] = []  # those below each mark
    memo: dict[int, Any] = {}
    for name, argument in _opcodes(content):
        match name:
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int.from_bytes(argument, "little")])
            case _ if name in _VALUES:
                stack.append(_VALUES[name](argument))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[int.from_bytes(argument, "little") if argument else len(memo)] = stack[-1]
            case "MARK":
                outer_stacks.append(stack)
                stack = []
            case "APPENDS":
                items, stack = stack, outer_stacks.pop()
                stack[-1].extend(items)
            case "SETITEMS":
                items, stack = stack, outer_stacks.pop()
                stack[-1].update(zip(items[::2], items[1::2], strict=False))
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "SETITEM":
                item, key = stack.pop(), stack.pop()
                stack[-1][key] = item
            case "TUPLE2":
                second, first = stack.pop(), stack.pop()
                stack.append(_make_pair(first, second))
            case "PROTO" | "FRAME":
                pass
            case _:
                raise ValueError(f"may do more than contain values: opcode {name}")
    return stack.pop()


def _make_pair(first: object, second: object) -> tuple[str, str]:
    """Return a tuple of two texts. The hash of a tuple within a tuple is recursive C code, so there is no other."""
    if not isinstance(first, str) or not isinstance(second, str):
        raise ValueError("holds a tuple that is not a pair of texts")
    return first, second


def _opcodes(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each opcode before the last one, with its argument. Raises ValueError."""
    place = 0
    for _ in range(_MOST_OPCODES):
        if place >= len(content):
            raise ValueError("is not a complete pickle: it ends early")
        name, size, is_counted = _OPCODES.get(content[place], ("unknown", 0, False))
        if name == "STOP":
            return
        place += 1 + size
        argument = content[place - size : place]
        if is_counted:
            size = int.from_bytes(argument, "little")
            if name == "LONG1" and size > _LONGEST_INTEGER_BYTES:
                raise ValueError(f"holds an integer of {size} bytes")
            place += size
            argument = content[place - size : place]
        yield name, argument
    raise ValueError(f"has more than {_MOST_OPCODES:,} opcodes")
