"""Names of files that run Python: the interpreter, and the library that another program may load instead."""

import re

_PROGRAMS = ("python", "pypy")
_LIBRARY = re.compile(r"/lib(?:python|pypy)[0-9][^/]*$")
_FREE_THREADED = re.compile(r"/(?:lib)?python3\.\d+t(?:$|\.so)")


def is_interpreter(path: str) -> bool:
    """True for the path or the name of an interpreter: "/usr/bin/python3.12", "pypy3"."""
    name = path.rpartition("/")[2]
    return name.startswith(_PROGRAMS) and ".so" not in name


def is_library(path: str) -> bool:
    """True for the path of a library that contains an interpreter: "/usr/lib/libpython3.12.so.1.0"."""
    return _LIBRARY.search(path) is not None


def is_free_threaded(path: str) -> bool:
    """True for the interpreter or the library of a free-threaded build: "/usr/bin/python3.14t"."""
    return _FREE_THREADED.search(path) is not None
