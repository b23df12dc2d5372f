"""Decoders of types are prepared under one lock, without which a process soon dies of a segmentation fault."""

import sys

import pytest

from tests.commands import finished

RACE = """
import sys, threading
import msgspec
from hangwatch.formats import decoding

way = sys.argv[1]
sys.setswitchinterval(1e-6)
for number in range(100):
    inner = msgspec.defstruct(f"Inner{number}", [(f"f{k}", dict[str, tuple[int, ...]], {}) for k in range(20)])
    kind = msgspec.defstruct(f"Outer{number}", [(f"g{k}", dict[str, inner], {}) for k in range(20)])
    gate, found = threading.Barrier(8), []

    def decode():
        gate.wait()
        if way == "json":
            found.append(decoding.decode_json(b'{"g3": {"a": {"f3": {"x": [1]}}}}', kind))
        elif way == "toml":
            found.append(decoding.decode_toml('g3 = {a = {f3 = {x = [1]}}}', kind))
        else:
            found.append(decoding.convert({"g3": {"a": {"f3": {"x": [1]}}}}, kind))

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.g3["a"].f3 for one in found] == [{"x": (1,)}] * 8
"""


@pytest.mark.parametrize("way", ["json", "toml", "convert"])
def test_new_type_decoded_by_several_threads_does_not_crash(way: str) -> None:
    done = finished(sys.executable, "-c", RACE, way, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
