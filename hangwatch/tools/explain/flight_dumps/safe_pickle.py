"""Reader for a pickle of plain values. It loads no classes and has limits of memory and time. Pure.

A pickle is a program: it may import and call anything, and a few bytes of it may create a huge value. So this is an
interpreter that knows only the opcodes that torch's pickler, or Python's, writes for dicts, lists, texts, numbers and
pairs of texts. Each opcode makes one value at most, and their number is limited.
Opcodes and their arguments: pickletools in Python's library; the output of torch:
torch/csrc/jit/serialization/pickler.cpp.
"""

import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any

from hangwatch import words

_MOST_OPCODES = 4_000_000
# Many keys with one hash make a dict slow, and the hash of a longer integer can be chosen
_LONGEST_INTEGER_BYTES = 8


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
    ord(opcode.code): (opcode.name, _COUNT_BYTES.get(size, size), size in _COUNT_BYTES, _VALUES.get(opcode.name))
    for opcode in pickletools.opcodes
    for size in ([0] if opcode.arg is None else [opcode.arg.n])
}
"""The name of each opcode, the number of bytes after it, True if these bytes are the number of further bytes, and the
function in `_VALUES`."""
_UNKNOWN = "unknown", 0, False, None
_BINGET = ord(pickle.BINGET)


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
    stacks: list[list[Any]] = [[]]  # those below each mark, and the current one
    memo: dict[int, Any] = {}
    place = 0
    for _ in range(_MOST_OPCODES):
        if place >= len(content):
            raise ValueError("is not a complete pickle: it ends early, after a full disk or an incomplete copy")
        if content[place] == _BINGET:  # half of the opcodes of torch: a name or a frame again
            stacks[-1].append(memo[content[place + 1]])
            place += 2
            continue
        name, size, is_counted, make = _OPCODES.get(content[place], _UNKNOWN)
        place += 1 + size
        argument = content[place - size : place]
        if is_counted:
            size = int.from_bytes(argument, "little")
            if name == "LONG1" and size > _LONGEST_INTEGER_BYTES:
                raise ValueError(f"holds an integer of {size} bytes")
            place += size
            argument = content[place - size : place]
        if make is not None:
            stacks[-1].append(make(argument))
        elif name == "STOP":
            return stacks[-1].pop()
        else:
            _combine(name, argument, stacks, memo)
    raise ValueError(f"has more than {_MOST_OPCODES:,} opcodes")


def _combine(name: str, argument: bytes, stacks: list[list[Any]], memo: dict[int, Any]) -> None:
    """Run an opcode that makes no value of its own. Raises ValueError if it may do more than that."""
    stack = stacks[-1]
    match name:
        case "MARK":
            stacks.append([])
        case "APPENDS":
            stacks[-2][-1].extend(stacks.pop())
        case "SETITEMS":
            stacks[-2][-1].update(zip(stack[::2], stack[1::2], strict=False))
            stacks.pop()
        case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
            memo[int.from_bytes(argument, "little") if argument else len(memo)] = stack[-1]
        case "LONG_BINGET":
            stack.append(memo[int.from_bytes(argument, "little")])
        case "APPEND":
            stack[-2].append(stack.pop())
        case "SETITEM":
            item, key = stack.pop(), stack.pop()
            stack[-1][key] = item
        case "TUPLE2":
            stack[-2:] = [_make_pair(*stack[-2:])]
        case _ if name not in ("PROTO", "FRAME"):
            raise ValueError(f"may do more than contain values: opcode {name}")


def _make_pair(first: object, second: object) -> tuple[str, str]:
    """Return a tuple of two texts. The hash of a tuple within a tuple is recursive C code, so there is no other."""
    if not isinstance(first, str) or not isinstance(second, str):
        raise ValueError("holds a tuple that is not a pair of texts")
    return first, second
