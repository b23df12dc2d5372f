"""Sets of nodes mean what they mean to Slurm, which prints them."""

import pytest

from hangwatch.tools.fleet import nodeset


@pytest.mark.parametrize(
    ("text", "count", "first", "last"),
    [
        ("dummy26[1-100]", 100, "dummy261", "dummy26100"),
        ("dgx-h100[1-32]", 32, "dgx-h1001", "dgx-h10032"),
        ("node2[0-15]", 16, "node20", "node215"),
        ("node[01-128]", 128, "node01", "node128"),
        ("node[001-010,020]", 11, "node001", "node020"),
        ("n[1-2]-ib", 2, "n1-ib", "n2-ib"),
        ("r[1-2]n[01-03]", 6, "r1n01", "r2n03"),
        ("n1,n[3-4],n1", 3, "n1", "n4"),
        ("a b", 2, "a", "b"),
        ("n[0-3]!n[1-2]", 2, "n0", "n3"),
        ("n[0-8/4]", 3, "n0", "n8"),
    ],
)
def test_set_is_expanded_as_slurm_does(text: str, count: int, first: str, last: str) -> None:
    names = nodeset.expand(text)
    assert (len(names), names[0], names[-1]) == (count, first, last)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[1-",
        "n[]",
        "n[a-b]",
        "n[9-1]",
        "n[1-99999999]",
        "n[1-999]m[1-999]",
        "-oProxyCommand=x",
        "n26[1-9]!n261",
        "n[0-99999999999]!n1",
    ],
)
def test_bad_or_ambiguous_set_is_an_error(text: str) -> None:
    with pytest.raises(nodeset.NodesError, match="--nodes"):
        nodeset.expand(text)
