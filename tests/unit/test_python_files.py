"""Names of files that run Python, as packages and builds of Linux name them."""

import pytest

from hangwatch.formats import python_files


@pytest.mark.parametrize(
    ("path", "interpreter", "library", "free_threaded"),
    [
        ("/usr/bin/python3.11", True, False, False),
        ("/opt/conda/bin/python", True, False, False),
        ("/usr/bin/python3.13-dbg", True, False, False),
        ("/usr/bin/python3.14t", True, False, True),
        ("/opt/pypy/bin/pypy3.11", True, False, False),
        ("/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0", False, True, False),
        ("/usr/lib/libpython3.14t.so.1.0", False, True, True),
        ("/opt/pypy/bin/libpypy3.11-c.so", False, True, False),
        ("/usr/lib/python3/dist-packages/python_snappy.so", False, False, False),
        ("/usr/lib/python3.11/lib-dynload/_ctypes.so", False, False, False),
        ("/usr/bin/gpython", False, False, False),
    ],
)
def test_file_of_python_is_recognised(path: str, interpreter: bool, library: bool, free_threaded: bool) -> None:
    assert python_files.is_interpreter(path) == interpreter
    assert python_files.is_library(path) == library
    assert python_files.is_free_threaded(path) == free_threaded
