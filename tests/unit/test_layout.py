"""The layout of the package: few modules at the top, one subject per package, no repeated names."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hangwatch"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
PACKAGES = {path.parent for path in MODULES}

# Modules and packages with the same name: the pure half and the reading half of one subject.
TWO_HALVES = {
    "checks",
    "collective_timeout",
    "demo",
    "diagnosis",
    "environment",
    "explain",
    "incidents",
    "infiniband",
    "jobs",
    "memory_pressure",
    "network",
    "selftest",
    "stacks",
    "status",
}


def test_top_level_has_at_most_8_modules() -> None:
    assert len([path for path in MODULES if path.parent == Path()]) <= 8


def test_number_of_packages_is_25_to_40() -> None:
    assert 25 <= len(PACKAGES) <= 40, sorted(map(str, PACKAGES))


def test_base_name_repeats_only_for_two_halves_of_a_subject() -> None:
    names = Counter(path.stem for path in MODULES if not path.stem.startswith("__"))
    names.update(package.name for package in PACKAGES)
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated <= TWO_HALVES
    assert len(TWO_HALVES) <= 15
    assert repeated == TWO_HALVES, "a name that no longer repeats leaves the list"


def test_every_package_says_what_it_holds() -> None:
    for package in PACKAGES:
        assert (PACKAGE / package / "__init__.py").read_text().startswith('"""'), package


def test_named_tuple_has_no_other_base_class() -> None:
    """Python 3.10 refuses NamedTuple together with Generic."""
    for path in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(node, ast.ClassDef) and len(node.bases) > 1:
                assert "NamedTuple" not in map(ast.unparse, node.bases), f"{path}: {node.name}"
