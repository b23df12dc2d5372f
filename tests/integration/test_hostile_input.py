"""Hostile input for the real commands: one message, exit status 2, bounded memory and time."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch import store
from tests import commands, samples
from tests.commands import HANGWATCH, Finished, finished, write_config
from tests.conftest import obeys_ctrl_c
from tests.other_users import as_user, needs_root
from tests.servers import answering

MEMORY_BYTES = 1 << 30  # address space for a command that only refuses its input
SMALL = {"memory_bytes": 500_000_000, "cpu_seconds": 5}  # limits for small input
DEADLINE_SECONDS = 60
USER = 4001


def hangwatch(*arguments: str, output: int = subprocess.PIPE, **options: Any) -> Finished:
    """Run a command with bounded memory and CPU time. Fail if a signal ends it or if it reports a bug."""
    memory_bytes, cpu_seconds = options.pop("memory_bytes", MEMORY_BYTES), options.pop("cpu_seconds", DEADLINE_SECONDS)

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))

    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", "hangwatch", *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        stdin=options.pop("stdin", subprocess.DEVNULL),
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        preexec_fn=bound,
        env={**os.environ, "LD_LIBRARY_PATH": ""},
        **options,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "this is a bug" not in done.stderr, done.stderr
    return done


def refused(*arguments: str, says: str, **options: Any) -> None:
    """Assert that the command prints one message that contains `says`, and exits with 2."""
    done = hangwatch(*arguments, **options)
    commands.assert_refused(done, says)
    assert len(done.stderr) < 2000 + 2 * sum(map(len, arguments))


# --- configurations --------------------------------------------------------------------------------------------------

QUOTED = '"a\\""'
CONFIGURATIONS = {
    "a number of 5,000 digits": (f"[http]\nport = {'9' * 5000}\n", "digits"),
    "a number of 100 digits": (f"[http]\nport = {'9' * 100}\n", "port"),
    "lists, 20,000 deep": (f"a = {'[' * 20_000}", "nested too deeply"),
    "tables, 20,000 deep": (f"a = {'{a=' * 20_000}", "nested too deeply"),
    "a key of 20,000 parts": (f"[http]\n{'.'.join('a' * 20_000)} = 1\n", ":2: a key has more than 16 parts"),
    "a quoted key of 20,000 parts": (f"{' . '.join([QUOTED] * 20_000)} = 1\n", ":1: a key has more than 16 parts"),
    "a key of 20,000 parts in a table": (
        f"a = {{b = 1, {'.'.join('a' * 20_000)} = 1}}\n",
        ":1: a key has more than 16",
    ),
    "a section of 20,000 parts": (f"\n[{'.'.join('a' * 20_000)}]\n", ":2: a key has more than 16 parts"),
    "tables by inline keys, 600 deep": (
        f"x = {'{a.a.a.a.a.a.a.a.a.a.a.a.a.a.a=' * 40}1{'}' * 40}\n",
        "nested too deeply",
    ),
    "NUL in a path": ('[store]\ndirectory = "/a\\u0000b"\n', ":2: [store]: directory"),
    "NUL in the token's path": ('[http]\nincidents_token_file = "/a\\u0000b"\n', ":2: [http]: incidents_token_file"),
    "NUL in the address": ('[http]\nlisten = "127.0.0.1\\u0000"\n', ":2: [http]: listen"),
    "NUL in a check's section": ('[checks.storage]\nignored_mounts = ["/\\u0000"]\n', "ignored_mounts[0]: must not"),
}
WITH_CONFIGURATION = ("config --check", "check fd_limit --config", "explain - --config", "report any --config")
WITH_CONFIGURATION += tuple(f"{command} --config" for command in ("run", "dump", "incidents", "status", "timeline"))


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_that_cannot_be_meant(case: str, tmp_path: Path) -> None:
    text, says = CONFIGURATIONS[case]
    path = tmp_path / "hangwatch.toml"
    path.write_text(text)
    refused("config", "--check", str(path), says=says, **SMALL)


@pytest.mark.parametrize("command", WITH_CONFIGURATION)
def test_every_command_refuses_it(command: str, tmp_path: Path) -> None:
    path = tmp_path / "hangwatch.toml"
    path.write_text(CONFIGURATIONS["NUL in a path"][0])
    refused(*command.split(), str(path), says="[store]: directory")
    os.mkfifo(tmp_path / "pipe")
    for special in ("/dev/zero", tmp_path / "pipe"):
        commands.refused(*command.split(), special, says="is not a regular file")


REFUSED_BY_RUN = {
    "no address": ('[http]\nlisten = "no such host"\n', "not a valid address"),
    "no token": ('[http]\nincidents_token_file = "FOLDER/none"\n', "No such file"),
    "a short token": ('[http]\nincidents_token_file = "FOLDER/short"\n', "shorter than 16"),
    "an endless token": ('[http]\nincidents_token_file = "/dev/zero"\n', "is not a regular file"),
    "no web configuration": ('[http]\nweb_config_file = "FOLDER/none"\n', "No such file"),
    "a web configuration of another form": ('[http]\nweb_config_file = "FOLDER/short"\n', "web_config_file: "),
    "an endless web configuration": ('[http]\nweb_config_file = "/dev/zero"\n', "is not a regular file"),
    "one port for two": ("[http]\nport = 9836\nhealth_port = 9836\n", "are both 9836"),
    "no port for health": ("[http]\nport = 65535\n", "set health_port"),
    "an activity without a name": (
        '[[activities.rules]]\nactivity = "No Name"\nfunction = "f"\n',
        "'No Name' is not a valid name",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_RUN)
def test_config_check_refuses_what_run_refuses(case: str, tmp_path: Path) -> None:
    text, says = REFUSED_BY_RUN[case]
    (tmp_path / "short").write_text("short")
    path = tmp_path / "hangwatch.toml"
    store = f'[store]\ndirectory = "{tmp_path}/state"\n'  # an accepted configuration must not use this machine's store
    path.write_text(store + text.replace("FOLDER", str(tmp_path)))
    commands.refused("config", "--check", str(path), says=says)
    refused("run", "--config", str(path), says=says)


# --- incidents -------------------------------------------------------------------------------------------------------


def _world(size: int) -> Callable[[dict[str, Any]], None]:
    def change(incident: dict[str, Any]) -> None:
        for holder in (incident["job"], incident["grouping"], *incident["captures"]):
            holder["world_size"] = size

    return change


def _rank(incident: dict[str, Any]) -> None:
    incident["grouping"]["groups"][0]["members"][0]["id"]["rank"] = 1 << 62


INCIDENTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "2^62 ranks": (_world(1 << 62), "ranks are accepted"),
    "2^70 ranks": (_world(1 << 70), "ranks are accepted"),
    "rank 2^62": (_rank, "ranks are accepted"),
    "a number of 5,000 digits": (lambda incident: incident.update(schema_version="DIGITS"), "not an incident"),
}


def changed_incident(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Save an incident with this change of its JSON. Return its folder."""
    kept = store.open_writable(folder).save(samples.mismatch(), {})
    incident = json.loads((kept / "incident.json").read_text())
    change(incident)
    (kept / "incident.json").write_text(json.dumps(incident).replace('"DIGITS"', "9" * 5000))
    return str(kept)


@pytest.mark.parametrize("command", ["report", "report --json", "merge", "explain"])
@pytest.mark.parametrize("case", INCIDENTS)
def test_an_incident_that_cannot_be_meant(case: str, command: str, tmp_path: Path) -> None:
    change, says = INCIDENTS[case]
    refused(*command.split(), changed_incident(tmp_path, change), says=says)


@pytest.mark.parametrize("times", [(-1e308, 1e308), (0.0, 1e18), (1e308, 0.0)])
def test_an_incident_of_no_time_is_shown(times: tuple[float, float], tmp_path: Path) -> None:
    opened, closed = times
    folder = changed_incident(tmp_path, lambda one: one.update(opened_unix_seconds=opened, closed_unix_seconds=closed))
    for arguments in (("report",), ("merge",), ("report", "--html", str(tmp_path / "page.html"))):
        assert hangwatch(*arguments, folder).returncode == 0


# --- files and folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """Make 1,500 nested folders, a path too long for one call. Yield the topmost."""
    top = tmp_path / "deep"
    top.mkdir()
    nest = "import os\nfor _ in range(1500):\n    os.mkdir('folder')\n    os.chdir('folder')\n"
    finished(sys.executable, "-c", nest, cwd=top, check=True)
    yield top
    subprocess.run(["rm", "-rf", str(top)], check=True)


def test_a_folder_1500_deep(deep: Path) -> None:
    refused("explain", str(deep), says="is nested more than 64 folders deep")
    end = f"{deep}{'/folder' * 1500}"
    for command in ("explain", "merge", "report"):
        refused(command, end, says="")


@pytest.mark.parametrize("command", ["explain", "merge", "report"])
def test_an_endless_file(command: str, tmp_path: Path) -> None:
    refused(command, "/dev/zero", says="/dev/zero")
    link = tmp_path / "incident.json"
    link.symlink_to("/dev/zero")
    refused(command, str(tmp_path), says=str(tmp_path))


def test_fifo_without_a_writer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.txt")
    refused("explain", str(tmp_path / "rank0.txt"), says="is not a regular file")


def test_page_is_not_written_to_a_fifo_without_a_reader(kept: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page")
    for command in ("report", "explain", "merge"):
        refused(command, "--html", str(tmp_path / "page"), kept["INCIDENT"], says="a pipe without a reader")
        refused(command, "--html", "-", kept["INCIDENT"], says="give a file name", cwd=tmp_path)
    command = f"{sys.executable} -m hangwatch report --html >(cat >&2) {kept['INCIDENT']}; wait $!"
    assert "</html>" in finished("bash", "-c", command, check=True).stderr


def test_a_configuration_that_the_shell_made_is_read() -> None:
    command = f'{sys.executable} -m hangwatch config --check <(printf "[http]\nport = 70000\n")'
    done = finished("bash", "-c", command)
    assert done.returncode == 2
    assert ":2: [http]: port" in done.stderr, done.stderr


def test_a_report_of_a_file(kept: dict[str, str], tmp_path: Path) -> None:
    by_folder = hangwatch("report", kept["INCIDENT"]).stdout
    assert hangwatch("report", f"{kept['INCIDENT']}/incident.json").stdout == by_folder != ""
    (tmp_path / "null.json").write_text("null")
    refused("report", str(tmp_path / "null.json"), says="is truncated or not an incident")
    os.mkfifo(tmp_path / "pipe")
    refused("report", str(tmp_path / "pipe"), says="is not a regular file")


def test_a_pipe_that_the_shell_made_is_read(tmp_path: Path) -> None:
    """Read a pipe that the shell made, as in `hangwatch explain <(ssh node1 ...)`."""
    (tmp_path / "dump").write_text('Process 7: python\nThread 7 (idle): "MainThread"\n    f (a.py:1)\n')
    read, written = os.pipe()
    with subprocess.Popen(["cat", str(tmp_path / "dump")], stdout=written), os.fdopen(read):
        os.close(written)
        done = hangwatch("explain", f"/dev/fd/{read}", pass_fds=[read])
    assert (done.returncode, done.stderr) == (0, "")


def test_an_endless_input() -> None:
    with Path("/dev/zero").open("rb") as zero:
        refused("explain", "-", says="is a device", stdin=zero)
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as cat:
        refused("explain", "-", says="longer than 16 MiB", stdin=cat.stdout)
        cat.kill()


@pytest.mark.machines
@pytest.mark.parametrize("frame", ["    f (a.py:1)\n", "    f{0} (a{0}.py:{0})\n"], ids=["one", "distinct"])
def test_text_of_a_million_frames_in_a_thread_is_refused(frame: str, tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    with path.open("w") as file:
        file.write('Process 7: python\nThread 7 (idle): "MainThread"\n')
        file.writelines(frame.format(number) for number in range(1_000_000))
    refused("explain", str(path), says=f"{path}: not read: a thread has more than 16,384 frames", **SMALL)
    (tmp_path / "rank0.txt").write_text('Process 8: python\nThread 8 (idle): "MainThread"\n    f (a.py:1)\n')
    done = hangwatch("explain", str(tmp_path), **SMALL)
    assert done.returncode == 0, "the other files of the folder are read"
    assert "not read: a thread has more than 16,384 frames" in " ".join(done.stdout.split())


TEN_FRAMES = "".join(f"    f{number} (a{number}.py:{number + 1})\n" for number in range(10))
LINES_OF_FAULTHANDLER = "".join(f'  File "/a/a{number}.py", line {number + 1} in f{number}\n' for number in range(10))
PROCESS = 'Process {0}: python\nThread {0} (idle): "MainThread"\n'
MANY: dict[str, tuple[str, str, str]] = {
    "processes": ("", f"{PROCESS}{TEN_FRAMES}", "more than 16,384 processes"),
    "threads": (PROCESS.format(7), f'{TEN_FRAMES}Thread {{0}} (idle): "mine"\n', "more than 16,384 threads"),
    "threads of faulthandler": (
        "",
        f"Thread 0x00007f00{{0:08x}} (most recent call first):\n{LINES_OF_FAULTHANDLER}\n",
        "more than 16,384 threads",
    ),
    "different frames": ("", f"{PROCESS}{TEN_FRAMES.replace('(a', '(a{0}_')}", "more than 65,536 different frames"),
}


def _text_of(case: str, count: int, path: Path) -> None:
    head, each, _ = MANY[case]
    with path.open("w") as file:
        file.write(head)
        file.writelines(each.format(number + 7) for number in range(count))


@pytest.mark.machines
@pytest.mark.parametrize("case", MANY)
def test_text_of_a_million_frames_is_refused_in_time(case: str, tmp_path: Path) -> None:
    _text_of(case, 100_000, tmp_path / "dump.txt")
    refused("explain", str(tmp_path / "dump.txt"), says=MANY[case][2], **SMALL)


@pytest.mark.machines
@pytest.mark.parametrize("case", ["processes", "threads of faulthandler"])
def test_text_of_4_times_as_many_takes_less_than_7_times_the_cpu(case: str, tmp_path: Path) -> None:
    """Quadratic time would give a ratio of 11 or more, on a busy machine, too."""
    seconds = []
    for count in (4_000, 16_000):
        _text_of(case, count, tmp_path / "dump.txt")
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = hangwatch("explain", str(tmp_path / "dump.txt"), memory_bytes=SMALL["memory_bytes"])
        seconds.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        assert (done.returncode, done.stderr) == (0, "")
    assert seconds[1] < 7 * seconds[0]


def test_a_dump_with_a_number_of_5000_digits(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(
        f'Process {"9" * 5000}: python\nThread {"9" * 5000} (idle): "MainThread"\n    f (a.py:{"9" * 5000})\n'
    )
    done = hangwatch("explain", str(path))
    assert (done.returncode, "1 line is not part of a stack dump" in " ".join(done.stdout.split())) == (0, True)


# --- output streams and working directory ----------------------------------------------------------------------------

PRINTING = (
    *("explain INCIDENT", "merge INCIDENT", "merge --json INCIDENT", "report INCIDENT", "report --json INCIDENT"),
    *("incidents --config CONFIG", "incidents --json --config CONFIG", "config --sample", "dump --pid PID"),
    *("check fd_limit", "verdict --help", "--help"),
)


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, str]:
    folder = store.open_writable(tmp_path / "state").save(samples.mismatch(), {})
    return {"INCIDENT": str(folder), "CONFIG": str(write_config(tmp_path, tmp_path / "state"))}


@pytest.mark.parametrize("command", PRINTING)
def test_a_full_disk_behind_standard_output(command: str, kept: dict[str, str]) -> None:
    arguments = [{**kept, "PID": str(os.getpid())}.get(word, word) for word in command.split()]
    with Path("/dev/full").open("w") as full:
        refused(*arguments, says="No space left on device", output=full.fileno())


def test_a_full_disk_behind_standard_error() -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (("report", "/nowhere"), ("explain",), ("explain", "/nowhere")):
            done = subprocess.run([*HANGWATCH, *arguments], stdout=full, stderr=full, check=False, timeout=60)
            assert done.returncode == 2, arguments


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_not_reused_for_files(closed: tuple[int, ...], kept: dict[str, str]) -> None:
    """Close streams as `>&-` of a shell: no file may get their numbers."""
    shut = "".join(f" {number}>&-" for number in closed)
    page = Path(kept["CONFIG"]).with_name("page.html")
    for arguments, code in (
        (("report", kept["INCIDENT"]), 0),
        (("explain", "--html", str(page), kept["INCIDENT"]), 0),
        (("explain", "-"), 2),
    ):
        done = finished("sh", "-c", f'exec "$@"{shut}', "sh", *HANGWATCH, *arguments, stdin=subprocess.DEVNULL)
        assert (done.returncode, "this is a bug" in done.stderr) == (code, False), done.stderr
        assert bool(done.stdout) == (code == 0 and 1 not in closed)
    assert page.read_text().startswith("<!")
    assert page.read_text().rstrip().endswith("</html>")


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------

INTERRUPTED_AT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [("click", -signal.SIGINT, ""), ("hangwatch.tools.commands.incidents", 130, "\nstopped\n")],
)
def test_ctrl_c_while_it_starts_leaves_no_traceback(module: str, code: int, says: str, tmp_path: Path) -> None:
    """The console script and `python -m` start in the same module."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_AT.format(name=module))
    done = finished(
        *HANGWATCH, "report", "/nowhere", env={**os.environ, "PYTHONPATH": str(tmp_path)}, preexec_fn=obeys_ctrl_c
    )
    assert (done.returncode, done.stderr) == (code, says)
    assert 'hangwatch = "hangwatch.__main__:main"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_ctrl_c_ignored_by_the_parent_is_ignored(kept: dict[str, str], tmp_path: Path) -> None:
    """Ignore Ctrl-C if the parent process ignored it, as after `nohup` or `&` in a script."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_AT.format(name="click"))
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *HANGWATCH]
    done = finished(*ignoring, "report", kept["INCIDENT"], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")


@needs_root
@pytest.mark.parametrize("command", ["explain", "merge", "report"])
def test_a_working_directory_that_may_not_be_entered(command: str, tmp_path: Path) -> None:
    script = f"cd {tmp_path} && exec setpriv --reuid={USER} --regid={USER} --clear-groups {sys.executable} -m hangwatch"
    tmp_path.chmod(0o700)
    (tmp_path / "x").mkdir()
    opened = as_user(0)  # the interpreter is reachable; root opens the folder and enters it before it becomes the user
    for path in ("x", f"{tmp_path}/x"):
        done = finished(*opened, "sh", "-c", f"{script} {command} {path}")
        assert (done.returncode, done.stderr.count("hangwatch: ")) == (2, 1), done.stderr
        assert "this is a bug" not in done.stderr


# --- servers at --url ------------------------------------------------------------------------------------------------


def _page(body: bytes) -> Callable[[socket.socket], None]:
    return lambda client: client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)


def _endless(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    for _ in range(4096):  # at most 256 MiB
        client.sendall(bytes(1 << 16))


ANSWERS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "a number of 5,000 digits": (_page(b"9" * 5000), "is not hangwatch"),
    "lists, 20,000 deep": (_page(b"[" * 20_000), "is not hangwatch"),
    "half of a character": (_page(b'{"node": "\\ud800"}'), "is not hangwatch"),
    "no HTTP": (lambda client: client.sendall(b"\0" * 100), "does not respond"),
    "less than it says": (
        lambda client: client.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{"),
        "is not hangwatch",
    ),
    "no end": (_endless, "does not respond"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_answers_is_no_hangwatch(case: str) -> None:
    answer, says = ANSWERS[case]
    with answering(answer) as (port, _):
        refused("status", "--url", f"http://127.0.0.1:{port}", says=says)


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://127.0.0.1:99999999",
        f"http://127.0.0.1:{'9' * 5000}",
        "http://a b/",
        f"http://{'a' * 70}/",
    ],
)
def test_an_url_that_is_none(url: str) -> None:
    refused("status", "--url", url, says="127.0.0.1" if "127" in url else url[:10])
