"""The unit file, analyzed by systemd, and install.sh, run as root in separate namespaces."""

import gzip
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hangwatch import __version__
from tests.commands import Finished, finished, write_program

REPOSITORY = Path(__file__).parents[2]
SYSTEMD = REPOSITORY / "deploy/systemd"
DEB = REPOSITORY / "deploy/deb"
UNIT = SYSTEMD / "hangwatch.service"
INSTALL = SYSTEMD / "install.sh"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze (Debian package systemd) is not installed"
)
needs_sysusers = pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None, reason="systemd-sysusers (Debian: systemd) is not installed"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: install.sh is run in namespaces")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Return a folder with the unit file. This Python replaces the program, which need not be installed."""
    text = UNIT.read_text().replace("/opt/hangwatch/bin/hangwatch", sys.executable)
    (tmp_path / UNIT.name).write_text(text)
    return tmp_path


def analyze(*arguments: str, units: Path) -> Finished:
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:", "SYSTEMD_COLORS": "0"}
    return finished("systemd-analyze", *arguments, env=environ)


def settings(text: str) -> dict[str, list[str]]:
    """Return the directives of a unit file, each with its values in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[;":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def exposure(units: Path) -> float:
    told = analyze("security", "--offline=yes", "--no-pager", str(units / UNIT.name), units=units)
    found = re.search(r"Overall exposure level for hangwatch\.service: ([\d.]+)", told.stdout)
    assert found, told.stderr
    return float(found[1])


# --- the unit ------------------------------------------------------------------------------------------------------


@needs_systemd
def test_systemd_accepts_every_line_of_the_unit(units: Path) -> None:
    told = analyze("verify", "--man=no", str(units / UNIT.name), units=units)
    assert (told.returncode, told.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("wrong", ["WatchdgSec=30", "DevicePolicy=shut", "SystemCallFilter=@no-such-set"])
def test_verification_sees_a_line_that_is_wrong(units: Path, wrong: str) -> None:
    path = units / UNIT.name
    path.write_text(path.read_text().replace("[Service]\n", f"[Service]\n{wrong}\n"))
    told = analyze("verify", "--man=no", str(path), units=units).stderr
    assert wrong.partition("=")[0] in told or wrong.partition("=")[2] in told


@needs_systemd
def test_the_kernel_stack_drop_in_is_understood(units: Path) -> None:
    folder = units / f"{UNIT.name}.d"
    folder.mkdir()
    shutil.copy(SYSTEMD / "kernel-stack.conf", folder)
    told = analyze("verify", "--man=no", str(units / UNIT.name), units=units)
    assert (told.returncode, told.stderr) == (0, "")


@needs_systemd
def test_exposure_is_low_and_would_not_be_without_the_sandbox(units: Path) -> None:
    assert exposure(units) < 4.0
    path = units / UNIT.name
    path.write_text(
        re.sub(r"^(Protect|Restrict|SystemCall|Capability)\w+=.*\n", "", path.read_text(), flags=re.MULTILINE)
    )
    assert exposure(units) > 6.0


def test_no_protection_is_on_that_blinds_the_daemon() -> None:
    unit = settings(UNIT.read_text())
    assert not {
        "PrivateUsers",
        "ProtectClock",
        "PrivateDevices",
        "ProtectKernelLogs",
        "ProtectProc",
        "ProcSubset",
    } & set(unit)
    assert unit["ProtectHome"] == ["read-only"]
    allowed = {word for line in unit["SystemCallFilter"] for word in line.split()}
    assert {"ptrace", "adjtimex", "clock_adjtime"} <= allowed
    assert unit["SystemCallErrorNumber"] == ["EPERM"]
    assert {"/dev/kmsg r", "char-nvidia rw"} <= set(unit["DeviceAllow"])


def test_the_job_goes_first() -> None:
    unit = settings(UNIT.read_text())
    assert int(unit["Nice"][0]) > 0
    assert unit["OOMScoreAdjust"] == ["999"]
    assert {"MemoryMax", "CPUQuota", "TasksMax", "IOSchedulingClass"} <= set(unit)
    assert unit["OOMPolicy"] == ["continue"]
    assert unit["KillMode"] == ["mixed"]


def test_every_ambient_capability_is_explained_and_bounded() -> None:
    text = UNIT.read_text()
    unit = settings(text)
    assert unit["AmbientCapabilities"] == unit["CapabilityBoundingSet"]
    for name in unit["AmbientCapabilities"][0].split():
        assert re.search(rf"^# {name.removeprefix('CAP_')} +\S", text, re.MULTILINE), name
    assert "CAP_SYS_ADMIN" not in unit["AmbientCapabilities"][0]
    added = settings((SYSTEMD / "kernel-stack.conf").read_text())
    assert added == {"CapabilityBoundingSet": ["CAP_SYS_ADMIN"], "AmbientCapabilities": ["CAP_SYS_ADMIN"]}


def test_start_and_stop_fit_what_the_installer_puts_in_place() -> None:
    unit, script = settings(UNIT.read_text()), INSTALL.read_text()
    (command,) = unit["ExecStart"]
    assert command == "/opt/hangwatch/bin/hangwatch run --config /etc/hangwatch/hangwatch.toml"
    assert "PREFIX=/opt/hangwatch\n" in script
    assert "CONFIG=/etc/hangwatch\n" in script
    assert unit["StateDirectory"] == ["hangwatch"]
    assert "STATE=/var/lib/hangwatch\n" in script
    assert unit["RestartPreventExitStatus"] == ["2"], "a configuration; a port that is taken (75) is tried again"
    assert unit["Restart"] == ["always"]


@needs_sysusers
@needs_root
def test_the_user_is_a_system_user_without_a_shell(tmp_path: Path) -> None:
    (tmp_path / "etc/sysusers.d").mkdir(parents=True)
    shutil.copy(SYSTEMD / "hangwatch.sysusers", tmp_path / "etc/sysusers.d/hangwatch.conf")
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True, capture_output=True)
    (line,) = [line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("hangwatch:")]
    _, _, uid, _, _, home, shell = line.split(":")
    assert 0 < int(uid) < 1000
    assert (home, Path(shell).name) == ("/var/lib/hangwatch", "nologin")


# --- install.sh: refused cases ---------------------------------------------------------------------------------------


def refused(*arguments: str, script: Path = INSTALL, user: int | None = None) -> str:
    done = finished(script, *arguments, user=user, cwd="/")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def public_copy() -> Iterator[Path]:
    """Make a copy of install.sh that another user can read. Yield its path."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(shutil.copy(INSTALL, folder))
        copy.chmod(0o755)
        yield copy


def test_without_root_it_says_so_and_does_nothing(public_copy: Path) -> None:
    other = 65534 if os.geteuid() == 0 else None
    assert "must run as root" in refused(script=public_copy, user=other)
    assert "must run as root" in refused("--uninstall", script=public_copy, user=other)
    assert not Path("/opt/hangwatch").exists()


@needs_root
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--colour"], "unknown option: --colour"),
        (["--wheels"], "--wheels needs a folder"),
        (["--wheels", "/nowhere"], "pip wheel --wheel-dir /nowhere"),
        (["--purge"], "--purge goes with --uninstall"),
        pytest.param(["--python", "no-such-python"], "no-such-python: not found", marks=needs_sysusers),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], error: str) -> None:
    assert error in refused(*arguments)


@needs_root
@needs_sysusers
def test_an_old_python_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    old = write_program(tmp_path / "python3.6", '[ "$1" = --version ] && echo Python 3.6.8 && exit\nexit 1')
    assert "Python 3.6.8 is too old: hangwatch needs 3.10" in refused("--python", str(old))
    assert not Path("/opt/hangwatch").exists()


# --- install.sh: installation ----------------------------------------------------------------------------------------

# Every folder that install.sh writes to is a layer. There is no network, and systemd does not seem to run.
SANDBOX = """
set -eu
for folder in etc opt usr/local var/lib; do
  mkdir -p "$LAYERS/$folder/upper" "$LAYERS/$folder/work"
  mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$LAYERS/$folder/upper,workdir=$LAYERS/$folder/work" "/$folder"
done
mount -t tmpfs tmpfs /run
rm -rf /etc/hangwatch /opt/hangwatch /var/lib/hangwatch $(find /usr/local/share -name '*hangwatch*')
show() {
  echo "=== $1"
  for path in /etc/hangwatch /etc/hangwatch/* /etc/systemd/system/hangwatch.service /etc/sysusers.d/hangwatch.conf \\
    /usr/local/bin/hangwatch /opt/hangwatch /var/lib/hangwatch $(find /usr/local/share -name '*hangwatch*'); do
    [ ! -e "$path" ] || stat -c '%A %U %n' "$path"
  done
  ! getent passwd hangwatch >/dev/null || echo user
}
umask 077
"$INSTALL" --wheels "$WHEELS" --python "$PYTHON"
show installed
/usr/local/bin/hangwatch --version
! command -v man >/dev/null || MANPATH=/usr/local/share/man man hangwatch | grep -o 'hangwatch - finds hung training jobs'
bash -c '. /usr/local/share/bash-completion/completions/hangwatch; COMP_WORDS=(hangwatch sta) COMP_CWORD=1
  PATH=/usr/local/bin:$PATH _hangwatch_completion hangwatch; echo "completed: ${COMPREPLY[*]}"'
/sbin/ip link set lo up
/usr/local/bin/hangwatch demo --keep "$LAYERS/demo" >"$LAYERS/demo.txt" 2>&1 & demo=$!
for i in $(seq 600); do grep -q training "$LAYERS/demo.txt" && break; sleep 0.1; done
kill $demo; wait $demo || true
cat "$LAYERS/demo.txt"
setpriv --reuid=hangwatch --regid=hangwatch --clear-groups /opt/hangwatch/bin/hangwatch config --check /etc/hangwatch/hangwatch.toml
/opt/hangwatch/bin/py-spy --version
echo '# mine' >/etc/hangwatch/hangwatch.toml
touch /opt/hangwatch/kept
# No network here, and none of the folders of wheels that this machine may have.
nothing="env PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_NO_INDEX=1"
echo "=== refused"
$nothing "$INSTALL" --python "$PYTHON" 2>&1 | grep -v '^WARNING' || true
mkdir "$LAYERS/few"; cp "$WHEELS"/hangwatch-*.whl "$LAYERS/few"; rm -r /opt/hangwatch/lib/python3*/site-packages/apscheduler*
$nothing "$INSTALL" --wheels "$LAYERS/few" --python "$PYTHON" 2>&1 || true
"$INSTALL" --wheels "$WHEELS" --python "$PYTHON" --no-start
show again
cat /etc/hangwatch/hangwatch.toml
mkdir /var/lib/hangwatch
"$INSTALL" --uninstall
show uninstalled
"$INSTALL" --uninstall --purge
show purged
"$INSTALL" --uninstall
"""

CONFIG = {"/etc/hangwatch", "/etc/hangwatch/hangwatch.sample.toml", "/etc/hangwatch/hangwatch.toml"}
PROGRAM = {
    "/etc/systemd/system/hangwatch.service",
    "/etc/sysusers.d/hangwatch.conf",
    "/opt/hangwatch",
    "/usr/local/bin/hangwatch",
    "/usr/local/share/man/man1/hangwatch.1",
    "/usr/local/share/bash-completion/completions/hangwatch",
    "/usr/local/share/zsh/site-functions/_hangwatch",
    "/usr/local/share/fish/vendor_completions.d/hangwatch.fish",
}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution of `make dist`, built in a copy: setuptools leaves folders in the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", source / "dist", source], check=True)
    (archive,) = (source / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheels(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with wheels of hangwatch and of all its dependencies, as for a site without a network."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    subprocess.run([*pip, "wheel", "--wheel-dir", folder, sdist], check=True)
    return folder


def tracked(*under: str) -> set[str]:
    """Return the files of the repository below these folders, also new files that are not yet committed."""
    listed = finished("git", "ls-files", "-co", "--exclude-standard", *under, cwd=REPOSITORY, check=True)
    return {name for name in listed.stdout.splitlines() if os.path.lexists(REPOSITORY / name)}


def _hold_what_they_are_to_hold(sdist: Path, wheels: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers()}
    linked = tracked("deploy/helm/hangwatch/files")
    assert tracked("hangwatch", "deploy", "docs", "grafana") - linked <= packed
    assert not [name for name in packed if name.startswith(("tests", "benchmarks")) or "__pycache__" in name]
    (wheel,) = wheels.glob("hangwatch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == tracked("hangwatch")


@needs_root
@pytest.mark.timeout(900)
@needs_sysusers
def test_install_upgrade_uninstall_purge_without_a_network(sdist: Path, wheels: Path, tmp_path: Path) -> None:
    _hold_what_they_are_to_hold(sdist, wheels)
    environ = {
        **os.environ, "INSTALL": str(INSTALL), "WHEELS": str(wheels), "LAYERS": str(tmp_path), "PYTHON": sys.executable,
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", SANDBOX],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=800,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0
    stages = {part.splitlines()[0]: part.splitlines()[1:] for part in done.stdout.split("=== ")[1:]}

    def paths(stage: str) -> set[str]:
        return {line.split()[2] for line in stages[stage] if line.startswith(("-", "d", "l")) and line.count(" ") == 2}

    assert paths("installed") == CONFIG | PROGRAM
    assert "user" in stages["installed"]
    assert any(line.startswith("hangwatch, version") for line in stages["installed"])
    assert any("training: the GPUs are working" in line for line in stages["installed"]), "the demo starts"
    assert "/etc/hangwatch/hangwatch.toml: ok" in stages["installed"]
    assert "-rw-r--r-- root /etc/systemd/system/hangwatch.service" in stages["installed"]
    assert "-rw-r--r-- root /usr/local/share/man/man1/hangwatch.1" in stages["installed"]
    assert shutil.which("man") is None or "hangwatch - finds hung training jobs" in stages["installed"]
    assert "completed: status" in stages["installed"]
    assert "drwxr-xr-x root /opt/hangwatch" in stages["installed"]
    assert any(f"{INSTALL} --wheels wheels" in line for line in stages["refused"])
    assert any(line.startswith(f"install.sh: {tmp_path}/few does not hold") for line in stages["refused"])
    assert paths("again") == CONFIG | PROGRAM
    assert "# mine" in stages["again"]
    assert paths("uninstalled") == CONFIG | {"/var/lib/hangwatch"}
    assert paths("purged") == set()
    assert "user" not in stages["purged"]
    assert not Path("/opt/hangwatch").exists(), "the test must not change this machine"


@pytest.mark.parametrize("path", [*sorted(SYSTEMD.glob("*.sh")), *sorted(DEB.glob("*.sh")), *sorted(DEB.glob("p*"))])
def test_scripts_can_be_executed(path: Path) -> None:
    assert path.read_text().startswith("#!")
    assert path.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", path], check=True)


def test_the_debian_package_puts_things_where_the_unit_looks_for_them() -> None:
    script, (command,) = (DEB / "build.sh").read_text(), settings(UNIT.read_text())["ExecStart"]
    program, _, option, configuration = command.split()
    assert (option, Path(program).parents[1]) == ("--config", Path("/opt/hangwatch"))
    assert "venv=$root/opt/hangwatch\n" in script
    assert f"$root{configuration}" in script
    installer = INSTALL.read_text()
    assert (DEB / "hangwatch.toml").read_text() in installer.replace("\\n", "\n"), (
        "the same configuration from both installers"
    )


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb (Debian: dpkg) is not installed")
def test_the_debian_package_brings_program_unit_user_manual_and_completion(wheels: Path, tmp_path: Path) -> None:
    """See deploy/deb/test-in-nspawn.sh for install, upgrade and removal."""
    (wheel,) = wheels.glob("hangwatch-*.whl")
    pip = {"PIP": f"{sys.executable} -m pip -qq", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    build = [str(DEB / "build.sh"), "--python", sys.executable, "--output", str(tmp_path), str(wheel)]
    quick = {"DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}  # see dpkg-deb(1)
    subprocess.run(build, env={**os.environ, **pip, **quick}, check=True)
    (package,) = tmp_path.glob("hangwatch_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "root"], check=True)
    root = tmp_path / "root"
    wanted = {
        "usr/bin/hangwatch", "opt/hangwatch/bin/hangwatch", "opt/hangwatch/bin/py-spy", "etc/hangwatch/hangwatch.toml",
        "usr/lib/systemd/system/hangwatch.service", "usr/lib/sysusers.d/hangwatch.conf",
    }  # fmt: skip
    assert {name for name in wanted if not os.path.lexists(root / name)} == set()
    assert b".TH " in gzip.decompress((root / "usr/share/man/man1/hangwatch.1.gz").read_bytes())
    for shell, name in (
        ("bash", "bash-completion/completions/hangwatch"),
        ("zsh", "zsh/vendor-completions/_hangwatch"),
        ("fish", "fish/vendor_completions.d/hangwatch.fish"),
    ):
        assert f"_HANGWATCH_COMPLETE={shell}_complete" in (root / "usr/share" / name).read_text()
    field = ["dpkg-deb", "--field", package, "Version", "Depends"]
    told = finished(*field, check=True).stdout
    assert f"Version: {__version__}\n" in told and "Depends: python3 (>= " in told


# --- releases --------------------------------------------------------------------------------------------------------


def test_a_release_is_made_by_commands_that_anybody_can_type() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    typed = {target for step in steps for target in re.findall(r"\bmake ([\w-]+)", step)}
    makefile = (REPOSITORY / "Makefile").read_text()
    assert {"check", "release-check", "docs"} <= typed <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    recipe = makefile.partition("\nrelease-check:")[2].partition("\n\n")[0]
    assert all(target in recipe for target in ("dist", "image", "chart", "deb"))
    assert not re.search(r"\b(push|publish|upload)\b(?!-artifact)", " ".join(steps)), "nothing is published yet"
