"""The modules and lines that the mutation test names are there, also after a module was split."""

from tests import mutations


def test_the_modules_that_are_changed_by_chance_and_their_tests_are_there() -> None:
    for module, tests in mutations.TESTS.items():
        assert mutations.source_of(module)
        assert all((mutations.ROOT / "tests" / test).exists() for test in tests), module


def test_the_line_of_each_mutant_that_no_test_has_to_detect_is_there() -> None:
    for row in mutations.equivalent_rows():
        lines = "\n".join(map(str.strip, mutations.source_of(row.module).splitlines()))
        assert row.before in lines, row
