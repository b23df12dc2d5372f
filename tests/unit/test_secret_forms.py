"""Secrets in the texts of jobs: all forms are masked, quickly, and texts without secrets do not change."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.tables import secret_forms
from tests.secret_texts import FORMS, MORE, PLAIN, Text

ALL = FORMS | MORE


def test_the_audit_has_its_26_forms_and_each_row_has_a_case() -> None:
    assert len(FORMS) == 26
    assert {text.row for text in ALL.values()} == set(secret_forms.load())


@pytest.mark.parametrize("name", ALL)
def test_mask_of_a_known_form_leaves_nothing_of_the_secret(name: str) -> None:
    case = ALL[name]
    assert all(secret in case.text for secret in case.secrets)
    told = secret_forms.mask(f"ValueError: {case.text}")
    assert not any(secret in told for secret in case.secrets), told
    assert told.startswith("ValueError: ") or case.row == "private_key_line"
    assert secret_forms.mask(told) == told


@pytest.mark.parametrize("row", secret_forms.load())
def test_mask_without_a_row_leaves_a_secret_of_its_cases(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a row of the table, at least one secret of the row's cases remains. So every row is needed.
    rest = {name: form for name, form in secret_forms.load().items() if name != row}
    monkeypatch.setattr(secret_forms, "load", lambda: rest)
    told = {case.text: secret_forms.mask(case.text) for case in ALL.values() if case.row == row}
    assert any(secret in told[case.text] for case in ALL.values() if case.row == row for secret in case.secrets), told


@pytest.mark.parametrize("text", PLAIN)
def test_mask_of_a_plain_text_changes_nothing(text: str) -> None:
    assert secret_forms.mask(text) == text


@given(st.sampled_from(list(ALL.values())), st.text(alphabet="ab .,;\n", max_size=40))
def test_mask_finds_a_form_behind_any_words(case: Text, before: str) -> None:
    told = secret_forms.mask(f"{before}\n{case.text}")
    assert not any(secret in told for secret in case.secrets), told


def test_mask_of_a_hostile_text_takes_time_by_its_length() -> None:
    """Allow a text of four times the length less than 16 times the time."""
    words = {word for row in secret_forms.load().values() for word in row.holds if word}
    pieces = [
        *words,
        "://",
        "//a:",
        "&a",
        "token=",
        "token='",
        "token=1a.",
        "token: [",
        "password_",
        "password=(",
        "<a-password_",
        "--key",
        "-----BEGIN PRIVATE KEY-----",
        "eyJa.",
        "sk-a-",
        "basic ",
        "A1b",
        "1",
        '"\\',
    ]
    for piece, between in itertools.product(pieces, ("", " ", "_", "=")):
        short, long = (_seconds_to_mask(piece + between, characters) for characters in (1 << 12, 1 << 14))
        assert long < 8 * short + 0.1, (piece, between, short, long)


def _seconds_to_mask(piece: str, characters: int) -> float:
    text = (piece * characters)[:characters]
    began = time.process_time()
    secret_forms.mask(text)
    return time.process_time() - began
