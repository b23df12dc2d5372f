"""The parser of `py-spy dump --json`."""

import json

import pytest

from hangwatch.formats import pyspy_json


def thread(name: str | None, tid: int, *frames: tuple[str, str, int]) -> dict[str, object]:
    return {
        "pid": 7,
        "thread_id": tid << 12,
        "thread_name": name,
        "os_thread_id": tid,
        "active": False,
        "owns_gil": False,
        "frames": [
            {
                "name": function,
                "filename": f"/usr/lib/{file}",
                "module": None,
                "short_filename": file,
                "line": line,
                "locals": None,
                "is_entry": True,
                "is_shim_entry": False,
            }
            for function, file, line in frames
        ],
        "process_info": None,
    }


def test_frames_keep_order_names_and_lines() -> None:
    text = json.dumps([thread("MainThread", 7, ("Condition.wait", "threading.py", 320), ("main", "train.py", 9))])
    (read,) = pyspy_json.parse_json(text, 7)
    assert [str(frame) for frame in read.frames] == ["Condition.wait (threading.py:320)", "main (train.py:9)"]
    assert (read.name, read.thread_id, read.is_main) == ("MainThread", "7", True)


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        ("python3.11/threading.py", 1),
        ("python3.13t/threading.py", 1),
        ("python3.11/site-packages/torch/x.py", 1),
        ("../../tmp/torchinductor_me/ab/cab.py", 1),
        ("../../home/me/python3/train.py", 0),
    ],
)
def test_installed_frames_are_counted(file: str, installed: int) -> None:
    (read,) = pyspy_json.parse_json(json.dumps([thread("MainThread", 7, ("f", file, 1))]), 7)
    assert read.installed_frames == installed


@pytest.mark.parametrize(
    ("threads", "pid", "main"),
    [
        ([thread("MainThread", 1), thread("Thread-1", 9)], 4711, 0),  # in a pid namespace
        ([thread(None, 8), thread(None, 7)], 7, 1),
        ([thread(None, 8, ("run", "threading.py", 1)), thread(None, 1, ("<module>", "train.py", 3))], None, 1),
    ],
    ids=["by name", "by pid", "by the module that it runs"],
)
def test_main_thread_is_found(threads: list[dict[str, object]], pid: int | None, main: int) -> None:
    read = pyspy_json.parse_json(json.dumps(threads), pid)
    assert [at for at, one in enumerate(read) if one.is_main] == [main]


def test_locals_are_kept_when_a_person_asked_for_them() -> None:
    dump = [thread("MainThread", 7, ("main", "train.py", 9))]
    dump[0]["frames"][0]["locals"] = [
        {"name": "step", "addr": 1, "arg": False, "repr": "12"},
        {"name": "x", "repr": None},
    ]  # type: ignore[index]
    (read,) = pyspy_json.parse_json(json.dumps(dump), 7)
    assert read.frames[0].locals == (("step", "12"), ("x", ""))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"frames": 1}]', "Process 7: python", b"\xff\xfe", '[{"frames": [{"name": 3}]}]']
)
def test_text_that_is_not_a_dump_is_an_error(text: str | bytes) -> None:
    with pytest.raises(pyspy_json.DumpError, match="py-spy dump --json"):
        pyspy_json.parse_json(text, 7)


def test_runaway_recursion_and_floods_of_threads_are_bounded() -> None:
    frame = {"name": "again", "filename": "/a.py", "module": None, "short_filename": "a.py", "line": 1, "locals": None}
    last = {**frame, "name": "<module>"}
    main = {"thread_name": "MainThread", "thread_id": 1, "os_thread_id": 1, "frames": [*[frame] * 5000, last]}
    other = {"thread_name": "t", "thread_id": 2, "os_thread_id": 2, "frames": [frame]}
    threads = pyspy_json.parse_json(json.dumps([*[other] * 1000, main]), 1)
    assert len(threads) == pyspy_json.MOST_THREADS + 1
    assert "left out" in (threads[-1].name or "")
    assert threads[0].is_main
    assert len(threads[0].frames) == pyspy_json.INNERMOST_FRAMES + pyspy_json.OUTERMOST_FRAMES + 1
    assert threads[0].frames[-1].function == "<module>"


@pytest.mark.parametrize(("os_thread_id", "active"), [(7, True), (None, None)], ids=["seen", "not seen"])
def test_a_thread_is_active_only_if_its_state_was_seen(os_thread_id: int | None, active: bool | None) -> None:
    """Without a pause py-spy does not see the states of threads up to CPython 3.10, and reports them as active."""
    row = {**thread("MainThread", 7), "os_thread_id": os_thread_id, "active": True}
    (read,) = pyspy_json.parse_json(json.dumps([row]), 7)
    assert read.active is active


def test_whole_paths_are_cut_to_the_package_or_the_program() -> None:
    """Shorten whole paths, which pystack prints."""
    frames = [
        {"name": "wait", "filename": "/opt/py/lib/python3.13t/threading.py", "line": 7},
        {"name": "all_reduce", "filename": "/opt/py/lib/python3.13t/site-packages/torch/x.py", "line": 8},
        {"name": "load", "filename": "/job/data/load.py", "line": 9},
        {"name": "<module>", "filename": "/job/train.py", "line": 1},
    ]
    (thread,) = pyspy_json.parse_json(json.dumps([{"os_thread_id": 7, "owns_gil": False, "frames": frames}]), 7)
    assert [frame.file for frame in thread.frames] == ["threading.py", "torch/x.py", "data/load.py", "train.py"]
    assert (thread.is_main, thread.installed_frames) == (True, 2)


def test_long_names_are_cut() -> None:
    """A few processes could fill gigabytes of the daemon."""
    long = "x" * 4000
    (read,) = pyspy_json.parse_json(json.dumps([thread(long, 7, (f"f{long}", f"/home/u/{long}/train.py", 3))]), 7)
    (frame,) = read.frames
    assert (len(read.name or ""), len(frame.function), len(frame.file)) == (256, 256, 256)
    assert frame.function.startswith("fxx") and frame.function.endswith("…")
    assert frame.file.startswith("…") and frame.file.endswith("x/train.py")
