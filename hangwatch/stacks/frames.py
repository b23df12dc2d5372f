"""Reduction of a stack to the parts that are equal on all ranks: names, short paths, no launcher frames. Pure."""

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from hangwatch import tables, words
from hangwatch.model import Frame, Thread

Place = tuple[str, str]
"""The function and the short path of a frame. Ranks and nodes are compared by these two."""

# Folders of packages that are not the user's: a wheel or egg that is imported without unpacking, site-packages, the
# standard library (also in an archive).
_INSTALLED = re.compile(
    r"^.*\.(?:whl|egg)/|^(?:.*?/)?(?:site-packages|dist-packages)/"
    r"|^(?:.*?/)?lib(?:64)?/python[23](?:\.\d+)?t?/|^(?:.*?/)?python3\d+t?\.zip/"
)
_ARCHIVE = re.compile(r"^.*(?:\.(?:zip|pex|par|xar|pyz)|#link-tree)/")  # the user's program may lie there, too
_GENERATED = re.compile(r"^.*/torchinductor[^/]*/.*$|^<eval_with_key>.*$|^<ipython-input.*$|^.*/tmp/(?:tmp)?[^/]*/")
_INDUCTOR = re.compile(r"^c[a-z2-7]{51}\.py$")  # named by a hash; py-spy prints no folder
_GENERATED_NAMES = (("torchinductor", "<inductor>"), ("<eval_with_key>", "<eval_with_key>"), ("<ipython", "<ipython>"))
_C_LIBRARY = re.compile(r"(^|/)(libc|libpthread|ld-linux|linux-vdso|\[vdso)[-.\]\w]*")
_NATIVE_FILE = re.compile(r"\.so(?:\.|$)|\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|rs|S|s)$|^python[\d.]*$|^\[|^\?*$|^lib[^/]*$")


class _Files(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    launchers: frozenset[str]
    standard_packages: frozenset[str]


_FILES = tables.load("hangwatch.tables", "stack_files.toml", _Files)
_THREAD_START = ("_bootstrap", "_bootstrap_inner", "run")
# A process chooses its names, and nested brackets are removed level by level
_LONGEST_NAME = 1000
_QUALIFIERS = frozenset({"const", "volatile", "noexcept", "&", "&&"})  # after the parameters of a C++ function
_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\[[^\[\]]*\]")


def plain_name(function: str) -> str:
    """Return the last part of a function's name: `Condition.wait` and `wait` are both `wait`."""
    return function.rsplit(".", 1)[-1] or function


@lru_cache(maxsize=1 << 16)
def short_path(file: str) -> str:
    """Return the path of a file, beginning with its package. It does not depend on where the package is installed."""
    short = _ARCHIVE.sub("", _INSTALLED.sub("", file))
    if _INDUCTOR.match(short):
        return "<inductor>"
    if _GENERATED.match(short):
        for mark, name in _GENERATED_NAMES:
            if mark in short:
                return name
        return re.sub(r"^.*/tmp/[^/]*/", "", short)
    return short


@lru_cache(maxsize=1 << 16)
def is_native(function: str, file: str) -> bool:
    """True if a frame is compiled code, as `py-spy --native` shows it. Such frames change while a thread spins."""
    if file.startswith("<") or file.endswith((".py", ".pyx", ".pyc")) or function == "<module>":
        return False
    return function.startswith("0x") or _NATIVE_FILE.search(file) is not None


def is_in_c_library(file: str) -> bool:
    """True if a file is the C library or the code that the kernel maps into a process: most waits end there."""
    return _C_LIBRARY.search(file) is not None


@lru_cache(maxsize=1 << 16)
def is_import(file: str) -> bool:
    """True if a file is Python's import machinery."""
    return "importlib" in file and ("<frozen" in file or "_bootstrap" in file)


@lru_cache(maxsize=1 << 16)
def _is_launcher(function: str, file: str) -> bool:
    if function == "<module>" or is_import(file) or is_native(function, file):
        return True
    short = short_path(file)
    if short == "threading.py":
        return plain_name(function) in _THREAD_START
    return short in _FILES.launchers


def display_name(place: Place) -> str | None:
    """Return the name of a function for messages. None if it has no name (a lambda, an address, a C++ wrapper).

    A C++ name is shown without template and function parameters: `c10d::Reducer::finalize_backward`.
    """
    function, file = place
    if not is_native(function, file):
        name = plain_name(function)
        return None if name.startswith("<") and name != "<module>" else name
    if function.startswith("0x") or "{lambda" in function or "operator()" in function:
        return None
    function = function[:_LONGEST_NAME]
    while function != (shorter := _BRACKETS.sub("", function)):
        function = shorter
    parts = [part for part in function.split() if part not in _QUALIFIERS]
    name = parts[-1] if parts else ""
    return None if not name or name.startswith(("std::", "absl::", "Absl")) else name


def is_standard(file: str) -> bool:
    """True if a short path belongs to Python's standard library."""
    folder, slash, _ = file.partition("/")
    return folder in _FILES.standard_packages if slash else file.removesuffix(".py") in sys.stdlib_module_names


def find_owners(files: Sequence[str], installed_frames: int | None) -> tuple[bool | None, ...]:
    """Return for each file true if it belongs to the user's program, false if to a library, None if unknown.

    The innermost frame comes first. Frames before the index `installed_frames` (`model.Thread`) belong to libraries.
    For the other frames a whole path decides. For a short path, the frame at that index is the user's, and so are files
    in the same package or folder.
    """
    cut = len(files) if installed_frames is None else installed_frames
    known = files[cut] if cut < len(files) else None
    return tuple(
        False if installed_frames is not None and index < cut else _is_user_file(file, known)
        for index, file in enumerate(files)
    )


def _is_user_file(file: str, user_file: str | None) -> bool | None:
    """True if a file belongs to the user's program, as `user_file` does; false if to a library, None if unknown."""
    if _INSTALLED.match(file) or file.startswith("<frozen "):
        return False
    if file.startswith("<") or _GENERATED.match(file) or _INDUCTOR.match(file):
        return None
    if file.startswith("/") or file == user_file:
        return True
    if is_standard(file):
        return False
    same = (
        user_file is not None
        and not user_file.startswith(("/", "<"))
        and _find_package(file) == _find_package(user_file)
    )
    return True if same else None


def _find_package(file: str) -> str:
    package, folder, _ = file.partition("/")
    return package if folder else ""


def key_places(frames: Sequence[Frame]) -> tuple[Place, ...]:
    """Return the frames by which two stacks are compared. The innermost comes first.

    Launcher frames at the outer end, frames of the import machinery and native frames are removed. If no frame remains,
    the native frames are used.
    """
    end = len(frames)
    while end and _is_launcher(frames[end - 1].function, frames[end - 1].file):
        end -= 1
    python = (frame for frame in python_frames(frames[:end]) if not is_import(frame.file))
    # Addresses, and frames in the C library, change while a thread spins.
    native = (
        frame
        for frame in frames
        if is_native(*frame.place) and not frame.function.startswith("0x") and not is_in_c_library(frame.file)
    )
    chosen = tuple(python) or tuple(native)
    if chosen:
        return tuple((frame.function, short_path(frame.file)) for frame in chosen)
    names = ("?" if frame.function.startswith("0x") else frame.function for frame in frames)
    return tuple(dict.fromkeys(zip(names, (short_path(frame.file) for frame in frames), strict=True)))


def main_thread(threads: Iterable[Thread]) -> Thread | None:
    """Return the thread that runs the program; None if the dump does not show it."""
    for thread in threads:  # next() takes twice the time
        if thread.is_main:
            return thread
    return None


def python_frames(frames: Iterable[Frame]) -> list[Frame]:
    """Return the frames without those of compiled code."""
    return [frame for frame in frames if not is_native(*frame.place)]


def digest(part: object) -> str:
    """Return a short hash of a part of a stack."""
    return words.checksum(repr(part).encode(), 6)
