"""Parser of py-spy's JSON and error messages, for the py-spy probe and the reader of stored dumps."""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from hangwatch.formats import decoding
from hangwatch.model import Fault, Frame, Thread

MAY_DUMP = (
    "run hangwatch as root, or grant it CAP_SYS_PTRACE (and CAP_DAC_READ_SEARCH for interpreters under a 0700 folder)"
)
USE_GDB = "`gdb -p PID -ex py-bt` reads it with the debug symbols of Python, and stops it meanwhile"
_LONGEST_DETAIL = 400


class _Complaint(NamedTuple):
    """An error message of py-spy, of the kernel or of a shell, and its meaning."""

    words: re.Pattern[str]
    reason: str
    about: Literal["target", "tool"] = "tool"
    remedy: str = ""


UNHEARD = "DumpFailed"
"""The fault reason for an unknown message."""

# The first match counts. "tool": the dump failed for a reason that is not evidence about the process.
_COMPLAINTS = (
    _Complaint(
        re.compile(r"permission denied|not permitted|os error 1\b|os error 13\b|EPERM|EACCES", re.IGNORECASE),
        "PermissionDenied",
        "target",
        MAY_DUMP,
    ),
    _Complaint(
        re.compile(r"no such process|check that the process is running|os error 3\b|ESRCH", re.IGNORECASE),
        "ProcessGone",
        "target",
    ),
    _Complaint(re.compile(r"failed to suspend", re.IGNORECASE), "CannotPause", "target"),
    _Complaint(re.compile(r"timed? ?out", re.IGNORECASE), "Timeout", "target"),
    _Complaint(
        re.compile(r"python version|not a python", re.IGNORECASE),
        "NotPython",
        remedy="if it is not a Python process, give the pid of a rank: `hangwatch dump` without --pid finds the ranks",
    ),
    _Complaint(
        re.compile(r"python interpreter", re.IGNORECASE),
        "NoInterpreter",
        remedy="py-spy 0.4 also prints this for stacks deeper than 4,096 frames: use pystack or gdb",
    ),
    _Complaint(re.compile(r"ended by signal", re.IGNORECASE), "DumperCrashed", remedy=USE_GDB),
    _Complaint(re.compile(r"failed to get stack trace", re.IGNORECASE), "StackChanged"),
    _Complaint(
        re.compile(r"py-spy\S*: (command )?not found|command not found|py-spy\S*: no such file", re.IGNORECASE),
        "NoPyspy",
    ),
    _Complaint(re.compile(""), UNHEARD),
)


def fault_of_message(subject: str, message: str) -> Fault:
    """Return the fault for an error message of py-spy.

    For an unknown message the reason is `DumpFailed`, which says nothing about the dumped process.
    """
    complaint = next(each for each in _COMPLAINTS if each.words.search(message))
    return Fault(
        subject=subject,
        reason=complaint.reason,
        detail=message[:_LONGEST_DETAIL],
        remedy=complaint.remedy,
        about=complaint.about,
    )


def names_main_thread(text: bytes) -> bool:
    """True if a dump has the name of a main thread. Without it, the dump may show another interpreter of the process.

    py-spy 0.4 lists the threads of the newest interpreter only. It names no thread if that has not imported threading.
    """
    return b'"MainThread"' in text


class DumpError(Exception):
    """A dump that cannot be parsed. The message gives the expected and the actual content."""


class _Local(msgspec.Struct):
    name: str = ""
    repr: str | None = None


class _PySpyFrame(msgspec.Struct):
    name: str = ""
    filename: str | None = None
    short_filename: str | None = None
    module: str | None = None
    line: int = 0
    locals: list[_Local] | None = None


class _PySpyThread(msgspec.Struct):
    frames: list[_PySpyFrame] = []
    thread_id: int | None = None
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None


_JSON = decoding.decoder(list[_PySpyThread])
MOST_THREADS = 256  # of one process: stacks of one job must not fill the daemon's memory
INNERMOST_FRAMES = 192
OUTERMOST_FRAMES = 64
LONGEST_NAME = 256  # characters of a function, a file or a thread: programs choose these names


def parse_json(text: str | bytes, pid: int | None, *, sees_states: bool = True) -> tuple[Thread, ...]:
    """Parse the output of `py-spy dump --json` (0.4) for one process, and return its threads.

    `pid` is the pid of the process in its own pid namespace. It identifies the main thread if py-spy gives no
    names. With `sees_states` py-spy ran in that namespace. From another one it reports each thread as active. Of more
    than 256 threads, the main thread and 255 others are kept. An empty thread after them has the number of dropped
    threads. Raises DumpError if the text is not such a dump.
    """
    raw_threads = _decode(text)
    main = _main_index(raw_threads, pid)
    folder = "" if main is None else _program_folder(raw_threads[main].frames)
    threads = [
        _thread(thread, folder, is_main=index == main, sees_states=sees_states)
        for index, thread in enumerate(raw_threads)
    ]
    if len(threads) <= MOST_THREADS:
        return tuple(threads)
    threads.sort(key=lambda thread: not thread.is_main)
    left_out = Thread(name=f"<{len(threads) - MOST_THREADS:,} threads left out>", thread_id="", frames=())
    return (*threads[:MOST_THREADS], left_out)


def find_path(text: str | bytes, frame: Frame) -> str | None:
    """Return the whole path of the file of a frame in a dump; None if the dump does not have this frame.

    `frame` is without its locals. Raises DumpError if the text is not a dump.
    """
    raw_threads = _decode(text)
    main = _main_index(raw_threads, None)
    folder = "" if main is None else _program_folder(raw_threads[main].frames)
    found = (raw for thread in raw_threads for raw in thread.frames)
    return next((raw.filename for raw in found if structs.replace(_frame(raw, folder), locals=()) == frame), None)


def _decode(text: str | bytes) -> list[_PySpyThread]:
    try:
        return _JSON.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        start = text[:60]
        raise DumpError(
            f"not the JSON of `py-spy dump --json` (a list of threads): {error}; it starts {start!r}"
        ) from None


def _main_index(threads: list[_PySpyThread], pid: int | None) -> int | None:
    """Return the index of the main thread; None if there is none.

    It is found by its name, else by its id, else because its outermost frame is a module.
    """
    rules: tuple[Callable[[_PySpyThread], bool], ...] = (
        lambda thread: thread.thread_name == "MainThread",
        lambda thread: pid is not None and thread.os_thread_id == pid,
        lambda thread: bool(not thread.thread_name and thread.frames and thread.frames[-1].name == "<module>"),
    )
    return next((index for rule in rules for index, thread in enumerate(threads) if rule(thread)), None)


_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d+(?:\.\d+)?t?/|^<frozen |/torchinductor_[^/]+/|^<eval_with_key>"
    # python3.13t: a free-threaded build; what torch generates is not what the user wrote
)


_TO_PACKAGE = re.compile(r"^.*/(?:site|dist)-packages/|^.*?/lib(?:64)?/python\d+(?:\.\d+)?t?/")


def shorten_path(path: str, folder: str = "") -> str:
    """Return a path as py-spy shortens it: from the package on, or the part below the program's `folder`."""
    cut = _TO_PACKAGE.sub("", path)
    return cut.removeprefix(f"{folder}/") if folder else cut


def _installed(frames: Sequence[_PySpyFrame]) -> int:
    """Return the number of frames, counted from the innermost one, before the first frame of the user's code."""
    user_frames = (
        number for number, frame in enumerate(frames) if not frame.module and not is_installed(frame.filename)
    )
    return next(user_frames, len(frames))


def is_installed(file: str | None) -> bool:
    """True if the path is in the standard library or an installed package."""
    return file is not None and _INSTALLED.search(file) is not None


def _program_folder(frames: Sequence[_PySpyFrame]) -> str:
    """Return the folder of the program that the main thread runs; "" if unknown."""
    files = (
        frame.filename for frame in reversed(frames) if frame.name == "<module>" and not is_installed(frame.filename)
    )
    program = next(filter(None, files), "")
    return program.rpartition("/")[0] if program.startswith("/") else ""


def _thread(thread: _PySpyThread, folder: str, *, is_main: bool, sees_states: bool) -> Thread:
    number = thread.thread_id if thread.os_thread_id is None else thread.os_thread_id
    frames = [frame for frame in thread.frames if frame.name != "<shim>"]
    return Thread(
        name=_cut(thread.thread_name) if thread.thread_name else None,
        thread_id="" if number is None else str(number),
        frames=_bounded([_frame(frame, folder) for frame in frames]),
        # Without its number py-spy has not seen the state of a thread either, and reports it as active.
        active=thread.active if sees_states and thread.os_thread_id is not None else None,
        owns_gil=thread.owns_gil,
        is_main=is_main,
        installed_frames=min(_installed(frames), INNERMOST_FRAMES),
        pthread_id=thread.thread_id,
    )


def _bounded(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return all frames; of a runaway recursion, only the innermost and the outermost frames."""
    if len(frames) <= INNERMOST_FRAMES + OUTERMOST_FRAMES:
        return tuple(frames)
    left_out = Frame(function="<frames left out>", file="<hangwatch>")
    return (*frames[:INNERMOST_FRAMES], left_out, *frames[-OUTERMOST_FRAMES:])


def _frame(frame: _PySpyFrame, folder: str) -> Frame:
    file = frame.short_filename or (shorten_path(frame.filename, folder) if frame.filename else "?")
    return Frame(
        function=_cut(frame.name),
        file=file if len(file) <= LONGEST_NAME else f"…{file[1 - LONGEST_NAME :]}",
        line=frame.line or None,
        module=frame.module and _cut(frame.module),
        locals=tuple((local.name, local.repr or "") for local in frame.locals or ()),
    )


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
