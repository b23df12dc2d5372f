"""All parsers of foreign data on a few thousand changed inputs. `make long PART=fuzz` tries a million."""

import itertools

import pytest

from tests import fuzz_parsers

INPUTS = dict.fromkeys(fuzz_parsers.PARSERS, 150) | {"stacks and logs": 60, "configuration": 20}


@pytest.mark.parametrize("name", fuzz_parsers.PARSERS)
def test_changed_input_gives_a_value_or_the_documented_error(name: str) -> None:
    refused, bad = fuzz_parsers.fuzz(name, INPUTS[name], seed=0)
    assert bad is None
    parser = fuzz_parsers.PARSERS[name]
    assert not parser.errors or name == "stacks and logs" or refused


def test_other_error_of_a_parser_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fuzz_parsers.Parser(lambda raw: raw[1000], (ValueError,), [b"abc"])
    monkeypatch.setitem(fuzz_parsers.PARSERS, "broken", broken)
    refused, bad = fuzz_parsers.fuzz("broken", 10, seed=0)
    assert refused == 0 and bad is not None and bad.startswith("broken: IndexError")


def test_parser_that_does_not_return_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = fuzz_parsers.Parser(lambda raw: [byte for byte in itertools.cycle(raw) if byte == 0], (), [b"abc"])
    monkeypatch.setitem(fuzz_parsers.PARSERS, "endless", endless)
    monkeypatch.setattr(fuzz_parsers, "INTERRUPT_SECONDS", 0.2)
    assert fuzz_parsers.fuzz("endless", 1, seed=0)[1] == "endless: EndlessError: no return after 0.2 s of CPU: b'abc'"
