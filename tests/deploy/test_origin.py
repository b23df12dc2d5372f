"""hangwatch's addresses (repository, image) come from pyproject.toml: no page, script or chart has another one."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from msgspec import toml

from tests.commands import finished

ROOT = Path(__file__).parents[2]
PROJECT = toml.decode((ROOT / "pyproject.toml").read_text())
NAME = PROJECT["project"]["name"]
ORIGIN = PROJECT["tool"]["hangwatch"]["origin"]
# Values that builders replace, example words (RFC 2606), and the names of Kubernetes' annotations.
LOCAL = re.compile(r"^(localhost/|([\w-]+\.)*example\.(com|org)\b|([\w-]+\.)*kubernetes\.io/)")

CLONED = re.compile(r"git clone (?:-\S+ )*(\S+)")
PULLED = re.compile(
    r"(?:image\.repository=|\bIMAGE=|docker push |podman push |docker run [^\n`]* )([\w.:/-]*hangwatch)\b"
)
ADDRESS = re.compile(r"(?<![\w./-])(?:\w+://)?((?:[\w-]+\.)+[a-z]{2,}(?::\d+)?/[\w./~-]*\bhangwatch\b)")
# Installing by name queries an index. Installing from a folder, a wheel or a checkout does not.
BY_NAME = re.compile(
    rf"pip3? (?:install|download|wheel)(?! --no-index)(?: --?\S+)* ['\"]?{NAME}(?:\[[\w,]+\])?(?=['\"\s`]|$|[=<>~]=)"
)


def foreign(text: str) -> list[str]:
    """Return the addresses of hangwatch in a text that differ from pyproject.toml, and installations by name."""
    found = [place for place in CLONED.findall(text) if place != ORIGIN["repository"]]
    found += [place for place in PULLED.findall(text) if place != ORIGIN["image"] and not LOCAL.match(place)]
    ours = tuple(re.sub(r"^\w+://", "", place) for place in ORIGIN.values())
    found += [place for place in ADDRESS.findall(text) if not place.startswith(ours) and not LOCAL.match(place)]
    return found + BY_NAME.findall(text)


def texts() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    listed = finished("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if not name.startswith("tests/")]
    return [path for path in paths if path.is_file() and path.suffix not in {".png", ".json"}]


def test_no_file_names_another_place() -> None:
    paths = texts()
    assert len(paths) > 300
    assert {str(path.relative_to(ROOT)): found for path in paths if (found := foreign(path.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "git clone https://git.somewhere.net/x/hangwatch.git",
        "--set image.repository=ghcr.somewhere.io/x/hangwatch",
        "make image IMAGE=x/hangwatch",
        "see https://git.somewhere.net/x/hangwatch/issues",
        "pip install hangwatch",
        "pip install --upgrade 'hangwatch[pystack]'",
        "docker run --rm x/hangwatch explain",
    ],
)
def test_another_place_is_found(text: str) -> None:
    assert foreign(text)


@pytest.mark.parametrize(
    "text",
    [
        f"git clone {ORIGIN['repository']} hangwatch && cd hangwatch",
        f"make image IMAGE={ORIGIN['image']}",
        "title_link: https://git.example.com/hangwatch/blob/main/x",
        "pip install .", "pip install dist/hangwatch-0.1.0-py3-none-any.whl",
        "$pip install --no-index --find-links wheels --upgrade hangwatch",
        "curl http://127.0.0.1:9836/metrics | grep hangwatch",
    ],
)  # fmt: skip
def test_ours_and_local_ones_are_let_through(text: str) -> None:
    assert foreign(text) == []


def test_chart_and_packages_have_the_name_of_the_package() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/hangwatch/Chart.yaml").read_text())
    control = yaml.safe_load((ROOT / "deploy/deb/control").read_text().split("\n")[0])
    assert (chart["name"], control["Package"], ORIGIN["image"].rpartition("/")[2]) == (NAME, NAME, NAME)
    assert not {"home", "sources", "icon"} & set(chart), "nothing is published yet"
