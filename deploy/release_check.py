"""Check the files of a release in dist/: what they contain, their versions, and that each can be installed.

usage: make release-check (builds first), or .venv/bin/python deploy/release_check.py [--tag v0.1.0]

The contents of the wheel, the source distribution, the Debian package and the chart are compared with the files that
git tracks, those in the Debian package's environment with the lists of the installed distributions. Wheel and source
distribution are installed in new environments. The Debian package is extracted and seen at /opt/hangwatch, in a mount
namespace. Each runs `hangwatch --version`. The chart is rendered. A tag must be the version of the package, and the
changelog must have a heading for it.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from helm_python import HelmError
from helm_python import chart as helm_chart

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
VERSION = re.findall(r'^__version__ = "(.*)"', (ROOT / "hangwatch/__init__.py").read_text(), re.MULTILINE)[0]
IN_NAMESPACE = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--mount", "sh", "-euc")
IN_OPT = """mount -t tmpfs none /opt; mkdir /opt/hangwatch; mount --bind "$1" /opt/hangwatch
exec /opt/hangwatch/bin/hangwatch --version"""
CHART = "deploy/helm/hangwatch/"
NOT_IN_SOURCE = ("benchmarks/", "tests/", ".ci/", ".github/", ".gitignore")
MADE_IN_SOURCE = ("PKG-INFO", "setup.cfg")
COPIED_IN_DEB = {
    "etc/hangwatch/hangwatch.toml": "deploy/deb/hangwatch.toml",
    "usr/lib/systemd/system/hangwatch.service": "deploy/systemd/hangwatch.service",
    "usr/lib/sysusers.d/hangwatch.conf": "deploy/systemd/hangwatch.sysusers",
    "usr/share/doc/hangwatch/README.md": "README.md",
    "usr/share/doc/hangwatch/copyright": "deploy/deb/copyright",
    "usr/share/doc/hangwatch/examples/kernel-stack.conf": "deploy/systemd/kernel-stack.conf",
    **{f"DEBIAN/{name}": f"deploy/deb/{name}" for name in ("preinst", "postinst", "prerm", "postrm")},
}
MADE_IN_DEB = (
    *("DEBIAN/conffiles", "DEBIAN/control", "etc/hangwatch/hangwatch.sample.toml", "usr/bin/hangwatch"),
    *("usr/share/bash-completion/completions/hangwatch", "usr/share/zsh/vendor-completions/_hangwatch"),
    *("usr/share/fish/vendor_completions.d/hangwatch.fish", "usr/share/man/man1/hangwatch.1.gz"),
)
MADE_IN_VENV = ("bin/python", "bin/python3", "lib64", "pyvenv.cfg")


class ReleaseError(Exception):
    """A file of the release is missing or wrong."""


def run(*command: object, cwd: Path | None = None) -> str:
    """Return the output of a command. Raises ReleaseError if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tracked(*under: str) -> set[str]:
    """Return the files that git tracks below these folders."""
    return set(run("git", "ls-files", *under, cwd=ROOT).splitlines())


def tracked_in_folder(folder: str) -> set[str]:
    """Return the files that git tracks below a folder; in place of a link, the files behind it."""
    names = set()
    for name in tracked(folder):
        target = (ROOT / name).resolve().relative_to(ROOT).as_posix()
        names |= {name + behind.removeprefix(target) for behind in tracked(target)}
    return names


def files_below(folder: Path) -> set[str]:
    """Return the files and links below a folder, without compiled modules."""
    paths = (path for path in folder.rglob("*") if path.suffix != ".pyc" and (path.is_file() or path.is_symlink()))
    return {path.relative_to(folder).as_posix() for path in paths}


def find(pattern: str) -> Path:
    """Return the only file of this version in dist/. Raises ReleaseError."""
    files = sorted(DIST.glob(pattern))
    if len(files) != 1:
        raise ReleaseError(f"dist/{pattern}: {len(files)} files instead of one; remove old ones: make clean")
    return files[0]


def compare(name: str, wanted: Iterable[str], contained: Iterable[str]) -> None:
    """Raise ReleaseError if the two lists of files differ."""
    files, expected = set(contained), set(wanted)
    missing, unknown = sorted(expected - files), sorted(files - expected)
    if missing or unknown or not files:
        raise ReleaseError(f"{name}: {len(files)} files; missing {missing[:5]}, unexpected {unknown[:5]}")
    print(f"{name}: {len(files)} files, as expected")


def check_contents(wheel: Path, source: Path, chart: Path) -> None:
    """Compare wheel, source distribution and chart with the tracked files, and render the chart."""
    with zipfile.ZipFile(wheel) as archive:
        compare(wheel.name, tracked("hangwatch"), (name for name in archive.namelist() if ".dist-info/" not in name))
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {name for name in tracked_in_folder(".") if not name.startswith(NOT_IN_SOURCE)}
    compare(source.name, wanted | set(MADE_IN_SOURCE), (name for name in names if ".egg-info/" not in name))
    with tarfile.open(chart) as archive:
        names = {member.name.removeprefix("hangwatch/") for member in archive.getmembers() if member.isfile()}
    wanted = {name.removeprefix(CHART) for name in tracked_in_folder(CHART)}
    dashboards = re.compile("files/dashboards/(?![^/]*[.]json$)")  # .helmignore
    compare(chart.name, (name for name in wanted if not dashboards.match(name)), names)
    try:
        manifests = helm_chart.Chart.load(chart).render({"image": {"repository": "localhost/hangwatch"}})
    except HelmError as error:
        raise ReleaseError(f"{chart.name}: cannot be rendered: {error}") from error
    if "kind: DaemonSet" not in manifests["hangwatch/templates/daemonset.yaml"]:
        raise ReleaseError(f"{chart.name}: renders no DaemonSet")
    print(f"{chart.name}: renders {sum(bool(text.strip()) for text in manifests.values())} files")


def check_deb(package: Path) -> None:
    """Compare all files of the Debian package, and run its program from another folder."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run("dpkg-deb", "--raw-extract", package, root)
        venv = root / "opt/hangwatch"
        check_version(package.name, run(*IN_NAMESPACE, IN_OPT, "sh", venv))
        check_environment(package.name, venv)
        examples = {
            f"usr/share/doc/hangwatch/examples/{Path(name).name}": name for name in tracked("deploy/prometheus")
        }
        copied = COPIED_IN_DEB | examples
        others = {name for name in files_below(root) if not name.startswith("opt/hangwatch/")}
        compare(f"{package.name}, outside /opt", {*copied, *MADE_IN_DEB}, others)
        changed = [name for name in copied if (root / name).read_bytes() != (ROOT / copied[name]).read_bytes()]
    if changed:
        raise ReleaseError(f"{package.name}: these differ from the files that git tracks: {changed}")


def check_environment(name: str, venv: Path) -> None:
    """Compare the virtual environment of the Debian package with the tracked modules and with the lists of pip."""
    (packages,) = venv.glob("lib/python3*/site-packages")
    modules = files_below(packages / "hangwatch")
    compare(f"{name}, hangwatch", tracked("hangwatch"), (f"hangwatch/{module}" for module in modules))
    installed = {*MADE_IN_VENV, f"bin/{packages.parent.name}"}
    for record in packages.glob("*.dist-info/RECORD"):
        with record.open(newline="") as rows:
            installed |= {os.path.normpath(packages.relative_to(venv) / row[0]) for row in csv.reader(rows)}
    removed = f"{packages.relative_to(venv)}/hangwatch-{VERSION}.dist-info/direct_url.json"
    compare(f"{name}, /opt", installed - {removed}, files_below(venv) - {".gitignore"})  # of Python 3.13


def check_install(distribution: Path) -> None:
    """Install a distribution into a new environment, and run it."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        run(Path(folder, "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", distribution)
        check_version(distribution.name, run(Path(folder, "bin/hangwatch"), "--version"))


def check_version(name: str, text: str) -> None:
    """Raise ReleaseError if the output of --version is not this version."""
    if VERSION not in text.split():
        raise ReleaseError(f"{name}: --version prints {text.strip()!r}, expected {VERSION}")
    print(f"{name}: installed, {text.strip()}")


def check_tag(tag: str | None) -> None:
    """Raise ReleaseError if version, chart and changelog do not agree with the tag."""
    chart = (ROOT / "deploy/helm/hangwatch/Chart.yaml").read_text()
    if re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE) != [VERSION, VERSION]:
        raise ReleaseError(f"Chart.yaml: version and appVersion must be {VERSION}")
    if tag is None:
        return
    if tag != f"v{VERSION}":
        raise ReleaseError(f"tag {tag}: hangwatch/__init__.py has {VERSION}")
    if f"## [{VERSION}]" not in (ROOT / "CHANGELOG.md").read_text():
        raise ReleaseError(f"CHANGELOG.md has no heading [{VERSION}]: rename [Unreleased]")


def main() -> int:
    """Check all files. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", default=None)
    try:
        check_tag(parser.parse_args().tag)
        wheel, source = find(f"hangwatch-{VERSION}-*.whl"), find(f"hangwatch-{VERSION}.tar.gz")
        check_contents(wheel, source, find(f"hangwatch-{VERSION}.tgz"))
        check_install(wheel)
        check_install(source)
        if list(DIST.glob("hangwatch_*.deb")):
            check_deb(find("hangwatch_*.deb"))
        else:
            print("no Debian package in dist/: `make deb` makes it on Debian and Ubuntu")
    except ReleaseError as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
