"""The control group that freezes a process, on written trees. tests/integration uses real groups."""

from pathlib import Path

import pytest

from hangwatch.probes.process import control_groups


def tree(root: Path, cgroup: str, **files: str) -> tuple[Path, Path]:
    """Write /proc with process 7 in `cgroup`, and `files` below /sys/fs/cgroup. "__" is a slash, "_dot_" a dot."""
    (root / "proc/7").mkdir(parents=True)
    (root / "proc/7/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "sys"


V1 = "6:freezer:/slurm/job_1\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("name", "cgroup", "files", "state", "wchan", "expected"),
    [
        ("v2, by itself", "0::/a/b\n",
         {"a__b__cgroup_dot_events": "populated 1\nfrozen 1\n", "a__b__cgroup_dot_freeze": "1\n"}, "S", None, "/a/b"),
        ("v2, by the group above it", "0::/a/b\n",
         {"a__b__cgroup_dot_events": "populated 1\nfrozen 1\n", "a__b__cgroup_dot_freeze": "0\n",
          "a__cgroup_dot_freeze": "1\n"}, "S", None, "/a"),
        ("v2, asked to freeze and not yet frozen", "0::/a\n",
         {"a__cgroup_dot_events": "populated 1\nfrozen 0\n", "a__cgroup_dot_freeze": "1\n"}, "S", "do_wait", None),
        ("v2 and v1", "2:memory:/x\n0::/a\n",
         {"unified__a__cgroup_dot_events": "frozen 1\n", "unified__a__cgroup_dot_freeze": "1\n"}, "S", None, "/unified/a"),
        ("v1, by the group above it", V1,
         {"freezer__slurm__job_1__freezer_dot_state": "FROZEN\n",
          "freezer__slurm__job_1__freezer_dot_self_freezing": "0\n",
          "freezer__slurm__freezer_dot_self_freezing": "1\n"}, "D", None, "/freezer/slurm"),
        ("v1, thawed", V1, {"freezer__slurm__job_1__freezer_dot_state": "THAWED\n"}, "D", "nfs_wait", None),
        ("the groups are not to be seen, v2", "0::/../../pod\n", {}, "S", "do_freezer_trap", "/../../pod"),
        ("the groups are not to be seen, v1", V1, {}, "D", "__refrigerator", "/freezer/slurm/job_1"),
        ("it sleeps", "0::/../../pod\n", {}, "S", "do_epoll_wait", None),
        ("it runs", "0::/a\n", {"a__cgroup_dot_events": "frozen 1\n", "a__cgroup_dot_freeze": "1\n"}, "R", None, None),
        ("a name that would act on a terminal", "0::/\x1b[2J\n", {}, "S", "get_signal", "/\\x1b[2J"),
    ],
)  # fmt: skip
def test_frozen_cgroup_is_found(
    tmp_path: Path, name: str, cgroup: str, files: dict[str, str], state: str, wchan: str | None, expected: str | None
) -> None:
    assert control_groups.frozen_cgroup(7, state, wchan, *tree(tmp_path, cgroup, **files)) == expected, name


def test_frozen_cgroup_of_an_ended_process_is_none(tmp_path: Path) -> None:
    assert control_groups.frozen_cgroup(7, "S", "get_signal", tmp_path, tmp_path) is None
