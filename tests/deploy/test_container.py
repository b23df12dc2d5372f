"""The Dockerfile, step by step. Each instruction runs in a chroot.

Tests cannot pull a base image, so the file system of this machine replaces it. Every stage is a layer over `/`;
COPY copies, RUN runs. deploy/test-container.sh builds and starts the real image with buildah.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import hangwatch
from tests.commands import finished

pytestmark = pytest.mark.timeout(400)

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "Dockerfile"
VALUES = REPOSITORY / "deploy/helm/hangwatch/values.yaml"


class Instruction(NamedTuple):
    word: str
    rest: str


@dataclass
class Stage:
    """A FROM instruction of the Dockerfile and the instructions after it."""

    name: str
    steps: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [step.rest for step in self.steps if step.word == word]

    def environ(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for rest in self.all("ENV") for pair in shlex.split(rest))


def stages() -> list[Stage]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Stage] = []
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append(Stage(rest.partition(" AS ")[2] or "final"))
        elif found:
            found[-1].steps.append(Instruction(word, rest.strip()))
    return found


def context() -> list[Path]:
    """Return the files that the builder receives: the last matching pattern of .dockerignore decides."""
    patterns = [line for line in (REPOSITORY / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    tracked = finished("git", "ls-files", "-co", "--exclude-standard", cwd=REPOSITORY, check=True)
    paths = [*tracked.stdout.splitlines(), "hangwatch/__pycache__/config.cpython-312.pyc"]
    return [Path(name) for name in paths if _is_sent(name, patterns)]


def _is_sent(name: str, patterns: list[str]) -> bool:
    sent = True
    parts = Path(name).parts
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        if bare.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, bare[3:]) for part in parts)
        else:
            fits = fnmatch.fnmatch(parts[0], bare)
        if fits:
            sent = pattern.startswith("!")
    return sent


def test_the_builder_gets_the_package_and_nothing_else() -> None:
    sent = context()
    assert {path.parts[0] for path in sent} == {"hangwatch", "pyproject.toml", "README.md", "LICENSE"}
    assert not [path for path in sent if "__pycache__" in path.parts]


def test_port_paths_and_capabilities_are_those_of_the_chart() -> None:
    final = stages()[-1]
    values = yaml.safe_load(VALUES.read_text())
    port = values["config"]["http"]["port"]
    assert final.all("EXPOSE") == [f"{port} {port + 1}"]
    assert f"127.0.0.1:{port + 1}/healthz" in final.all("HEALTHCHECK")[0]
    assert values["config"]["store"]["directory"] in final.all("RUN")[0]
    template = (REPOSITORY / "deploy/helm/hangwatch/templates/daemonset.yaml").read_text()
    for name in re.findall(r"^ +- ([A-Z_]{4,})$", template, re.MULTILINE):
        assert name in DOCKERFILE.read_text()


def test_it_is_labelled_with_this_version() -> None:
    final = stages()[-1]
    assert f"VERSION={hangwatch.__version__}" in final.all("ARG")
    labels = dict(pair.split("=", 1) for pair in shlex.split(final.all("LABEL")[0]))
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_image_runs_as_a_numeric_user_that_is_not_root() -> None:
    (user,) = stages()[-1].all("USER")
    assert user.partition(":")[0].isdigit(), "Kubernetes can check runAsNonRoot only for a number"
    assert user.partition(":")[0] != "0"


class Image(NamedTuple):
    """The stages of the image, each in a folder. A stage is laid over `/` in a mount namespace."""

    layers: Path

    def run(self, stage: Stage, command: str, *namespaces: str, user: str, environ: dict[str, str]) -> str:
        """Run a shell command in the stage's root, in new namespaces. Return its output."""
        uid, _, gid = user.partition(":")
        variables = {
            **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))},
            "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "BASE": sys.base_prefix,
            "LAYER": str(self.layers / stage.name),
            "COMMAND": command,
            **environ,
        }
        done = subprocess.run(
            ["/usr/bin/unshare", "--mount", *namespaces, "/bin/sh", "-c", INSIDE, "sh", uid, gid],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout


# Changes go to $LAYER. overlayfs needs them on a separate file system, so tar copies them.
INSIDE = """
set -eu
/sbin/ip link set lo up
top=$(mktemp -d)
mount -t tmpfs tmpfs "$top"
mkdir "$top/upper" "$top/work" "$top/root"
mkdir -p "$LAYER"
tar -C "$LAYER" -cf - . | tar -C "$top/upper" -xpf -
mount -t overlay overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" "$top/root"
# This machine's Python may lie where only root can go; a base image's does not.
folder=$BASE
while [ "$folder" != / ]; do chmod a+x "$top/root$folder"; folder=$(dirname "$folder"); done
for folder in dev proc sys; do mount --rbind "/$folder" "$top/root/$folder"; done
mount -t tmpfs tmpfs "$top/root/tmp"
status=0
/usr/sbin/chroot --userspec="$1:$2" --groups= "$top/root" /bin/sh -c "cd ${WORKDIR:-/}; $COMMAND" || status=$?
umount -R "$top/root/dev" "$top/root/proc" "$top/root/sys" "$top/root/tmp" 2>/dev/null || true
tar -C "$top/upper" -cf - . | tar -C "$LAYER" -xpf -
exit $status
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Build both stages; yield the image."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the Dockerfile's steps run in a mount namespace")
    built = Image(tmp_path_factory.mktemp("image"))
    for stage in stages():
        folder = ""
        for word, rest in stage.steps:
            if word == "WORKDIR":
                folder = rest
                (built.layers / stage.name / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                _copy(built, stage, folder, rest)
            elif word == "RUN":
                built.run(stage, rest, user="0:0", environ={"WORKDIR": folder or "/"})
    yield built


def _copy(built: Image, stage: Stage, folder: str, rest: str) -> None:
    source_stage = re.match(r"--from=(\S+) ", rest)
    *sources, target = rest.removeprefix(source_stage[0] if source_stage else "").split()
    root = built.layers / stage.name
    for source in sources:
        if source_stage:
            shutil.copytree(built.layers / source_stage[1] / source[1:], root / target[1:], symlinks=True)
            continue
        found = [path for path in context() if path.parts[0] == source]
        assert found, f"COPY {source}: the builder is not sent it"
        for path in found:
            into = root / folder.lstrip("/") / path
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / path, into)


def as_started(image: Image, command: str, **environ: str) -> str:
    """Run a command as the started container would, with only a loopback network. Return its output."""
    final = stages()[-1]
    variables = {**final.environ(), **environ, "WORKDIR": "/"}
    return image.run(final, command, "--net", user=final.all("USER")[0], environ=variables)


def test_hangwatch_and_py_spy_start_in_it_without_rights(image: Image) -> None:
    (entrypoint,) = json.loads(stages()[-1].all("ENTRYPOINT")[0])
    assert as_started(image, f"{entrypoint} --version").strip() == f"hangwatch, version {hangwatch.__version__}"
    assert as_started(image, "py-spy --version").startswith("py-spy 0.4")
    assert as_started(image, "id -u").strip() == "65532"
    assert "[detector]" in as_started(image, "hangwatch config --sample")


def test_it_has_what_was_installed_and_no_tools_to_build_with(image: Image) -> None:
    final = image.layers / "final"
    installed = {path.name for path in final.glob("opt/hangwatch/lib/python*/site-packages/*")}
    assert {"hangwatch", "pynvml.py"} <= installed
    assert not {"pip", "setuptools", "pytest"} & installed
    assert not (final / "source").exists()
    assert not list(final.glob("opt/hangwatch/lib/python*/site-packages/*.pth")), "an editable install points outside"


def test_the_daemon_serves_and_the_health_check_sees_it(image: Image) -> None:
    health = json.loads(stages()[-1].all("HEALTHCHECK")[0].partition("CMD ")[2])
    answer = as_started(
        image,
        """
        hangwatch run >/tmp/log 2>&1 & daemon=$!
        for i in $(seq 100); do eval "$HEALTH" 2>/dev/null && break; sleep 0.1; done
        eval "$HEALTH" && echo healthy
        kill $daemon; wait $daemon; echo "ended with $?"
        eval "$HEALTH" 2>/dev/null || echo unhealthy
        cat /tmp/log
        """,
        HEALTH=shlex.join(health),
    )
    assert answer.splitlines()[:3] == ["healthy", "ended with 0", "unhealthy"], answer
    assert "metrics on [::]:9836" in answer
