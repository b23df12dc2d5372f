#!/usr/bin/python3
"""Run the commands of a user's first hour with hangwatch, in the machine that make.sh boots, and record them.

This script uses only the standard library, because it runs before anything is installed. It writes the transcript,
/out/first-hour.md, and the results, /out/first-hour.table. Then it powers off the machine with status 0, or with 1
if a step had an unexpected result.
"""

import html
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import ClassVar

GIVEN = Path("/given")
CHECKOUT = GIVEN / "checkout"
SCENARIO = Path("/var/lib/fake-driver/scenario")
OUT = Path("/out")
RANKS = 4
IDLE_WATTS = 90
PAGES_PORT = 5001  # as in alertmanager.example.yaml
PAGES = f"http://127.0.0.1:{PAGES_PORT}"
HOME = Path("/home/trainer")
TORCHRUN = (
    f"nohup venv/bin/torchrun --nproc-per-node {RANKS} --rdzv-backend c10d --rdzv-endpoint localhost:29500"
    " --rdzv-id llama-70b train.py data > train.log 2>&1 &"
)
LONGEST_OUTPUT_LINES = 48
DROP_IN = Path("/etc/systemd/system/hangwatch.service.d/no-real-gpu.conf")


class Transcript:
    """A transcript in Markdown: prose, commands as a person types them, and their output."""

    def __init__(self) -> None:
        self.text = self.since = ""
        self.results = "| after | step | result |\n| --- | --- | --- |\n"
        self.started = time.monotonic()

    def say(self, *paragraphs: str) -> None:
        for paragraph in paragraphs:
            self.text += paragraph + "\n\n"
            print(paragraph, flush=True)

    def result(self, step: str, result: str) -> None:
        """Add a row to the table in docs/benchmarks.md."""
        self.results += f"| {clock(self)} | {step} | {result} |\n"

    def type(self, command: str, user: str = "root", statuses: tuple[int, ...] = (0,)) -> str:
        """Run the command in a login shell of the user. Return its output if its exit status is in `statuses`."""
        # A terminal of 120 columns, as for a person, but without colours.
        shell = f"stty cols 120 rows 400; export NO_COLOR=1; {command}"
        argv = ["script", "-qec", f"bash -lc {shlex.quote(shell)}", "/dev/null"]
        if command.endswith("&"):  # the command outlives its terminal
            argv = ["bash", "-lc", command]
        argv = argv if user == "root" else ["su", "-", user, "-c", shlex.join(argv)]
        prompt = f"{user}@gpu-07:{'~# ' if user == 'root' else '~$ '}"
        print(prompt + command, flush=True)
        done = subprocess.run(
            argv, cwd="/root", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )
        printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # NO_COLOR leaves bold and dim
        print(printed, flush=True)
        if done.returncode not in statuses:
            raise AssertionError(f"{command}: status {done.returncode}")
        lines = [line.rstrip() for line in printed.rstrip().splitlines()]
        if len(lines) > LONGEST_OUTPUT_LINES:
            left = len(lines) - LONGEST_OUTPUT_LINES
            lines = [*lines[:LONGEST_OUTPUT_LINES], f"[{left} more lines]"]
        shown = "\n".join(line for line in lines if line or len(lines) > 1)
        self.text += "```console\n" + prompt + command + "\n" + (shown + "\n" if shown else "") + "```\n\n"
        return printed

    def quote(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Add a message, such as a page, to the transcript in the form that its reader gets."""
        self.text += f"> **{_plain(title)}**\n>\n"
        for name, value in rows:
            value = re.sub(r"```", "", value).strip()
            body = "\n".join("> " + line for line in value.splitlines())
            self.text += (
                f"> {name}\n>\n> ```text\n{body}\n> ```\n>\n" if "\n" in value else f"> {name}: {_linked(value)}\n>\n"
            )
        self.text += "\n"


def _plain(text: str) -> str:
    return html.unescape(" ".join(text.split()))


def _linked(value: str) -> str:
    return f"<{value}>" if value.startswith("http") else f"`{_plain(value)}`"


def within(seconds: float, true: Callable[[], object], what: str) -> None:
    """Wait until `true()` returns a true value. Raise AssertionError with `what` after this many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {seconds:.0f} s: {what}")
        time.sleep(0.2)


class Services(http.server.BaseHTTPRequestHandler):
    """A fake Slack and a fake PagerDuty. They keep the messages from Alertmanager."""

    received: ClassVar[list[tuple[str, dict]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append((self.path, body))
        answer = b'{"status":"success","message":"ok","dedup_key":"1"}' if "pagerduty" in self.path else b"ok"
        self.send_response(202 if "pagerduty" in self.path else 200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass

    @classmethod
    def to(cls, path: str) -> list[dict]:
        return [body for to, body in cls.received if path in to]


def pages() -> list[dict]:
    """Return the messages to Slack's on-call channel. Warnings of nodes go to the cluster's channel."""
    return [body for body in Services.to("slack") if body["channel"] == "#training-on-call"]


def set_power(watts: list[float], pids: list[int] | None = None) -> None:
    """Set the power of the GPUs in the fake driver, and the processes that hold them."""
    lines = [
        "driver_version 570.86.15",
        f"gpus {RANKS}",
        "gpu all name NVIDIA H100 80GB HBM3",
        "gpu all power_limit_watts 700",
        f"gpu all memory_total_bytes {80 * 2**30}",
        f"gpu all memory_used_bytes {70 * 2**30 if pids else 0}",
        "gpu all temperature_celsius 55",
        "gpu all persistence_mode 1",
    ]
    for gpu in range(RANKS):
        lines += [f"gpu {gpu} uuid GPU-{gpu:08x}-0000-4000-8000-000000000000", f"gpu {gpu} power_watts {watts[gpu]}"]
        # A rank that waits in a collective spins at full utilisation. A rank that waits for data does not use its
        # GPU.
        lines += [f"gpu {gpu} utilization_ratio {0.98 if watts[gpu] > IDLE_WATTS else 0}"]
        lines += [f"gpu {gpu} pids {pids[gpu]}"] if pids else []
    new = SCENARIO.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.chmod(0o644)
    new.replace(SCENARIO)


def ranks() -> list[int]:
    """Return the pids of the ranks of the user's job, in rank order."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environ = dict(
                part.split(b"=", 1) for part in (folder / "environ").read_bytes().split(b"\0") if b"=" in part
            )
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if (
            b"train.py" in command
            and b"RANK" in environ
            and b"torchrun" in Path(f"/proc/{parent}/cmdline").read_bytes()
        ):
            found[int(environ[b"RANK"])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def metric(pattern: str) -> bool:
    try:
        with urllib.request.urlopen("http://127.0.0.1:9836/metrics", timeout=5) as answer:
            return re.search(pattern, answer.read().decode(), re.MULTILINE) is not None
    except OSError:
        return False


def is_in_state(state: str) -> Callable[[], bool]:
    return lambda: metric(rf'^hangwatch_job_state\{{.*state="{state}"\}} 1')


def machine(transcript: Transcript) -> None:
    transcript.say(
        "# The first hour",
        "From a clean Debian machine to the page that one can act on, and to the job that goes on. Every command below was typed, and everything "
        "below a command was printed, by `make first-hour` (tests/first_hour/): a booted Debian in a container without a network, "
        "the real Prometheus and Alertmanager of Debian, a real torchrun job of another user, real py-spy. Three things replace what is not there: "
        "a fake `libnvidia-ml.so.1` for the GPUs, a listener for Slack and PagerDuty, a FIFO for a file server that stopped answering.",
        "## 00:00 A clean machine",
    )
    transcript.type(
        ". /etc/os-release; echo $PRETTY_NAME; python3 --version; prometheus --version 2>&1 | head -1; prometheus-alertmanager --version 2>&1 | head -1"
    )
    Path("/etc/hosts").write_text("127.0.0.1 localhost gpu-07\n::1 localhost\n")
    subprocess.run(["hostname", "gpu-07"], check=True)
    SCENARIO.parent.mkdir(parents=True)
    shutil.copy(GIVEN / "libnvidia-ml.so.1", "/usr/lib/libnvidia-ml.so.1")
    subprocess.run(["ldconfig"], check=True)
    set_power([70.0] * RANKS)
    DROP_IN.parent.mkdir(parents=True)
    DROP_IN.write_text(f"[Service]\nEnvironment=FAKE_NVML_SCENARIO={SCENARIO}\n")
    os.environ["FAKE_NVML_SCENARIO"] = str(SCENARIO)
    # nspawn gives the machine a read-only clock that is not synchronized: `hangwatch check` would report it.
    shutil.copytree(CHECKOUT, "/root/hangwatch")


def install(transcript: Transcript) -> None:
    transcript.say(
        "## Install",
        "This machine has no network: the wheels were made elsewhere (`pip wheel --wheel-dir wheels .`). With one, leave `--wheels` out.",
    )
    transcript.type(f"cd hangwatch && deploy/systemd/install.sh --wheels {GIVEN}/wheels")
    transcript.type("systemctl is-active hangwatch; hangwatch --version")
    transcript.result("`deploy/systemd/install.sh`", "the unit is active")
    transcript.say("What else is to happen as a job hangs: a [hook](docs/hooks.md), here a copy of the incident.")
    transcript.type("install -D -m 0755 -t /etc/hangwatch/hooks hangwatch/deploy/hooks/copy-incident.sh")
    hooks = '[hooks]\non_hung = ["/etc/hangwatch/hooks/copy-incident.sh", "{incident}", "/var/lib/hangwatch/copies"]'
    transcript.type(
        f"echo {shlex.quote(hooks)} >> /etc/hangwatch/hangwatch.toml; hangwatch config --check /etc/hangwatch/hangwatch.toml"
    )
    transcript.type("systemctl restart hangwatch; systemctl is-active hangwatch")
    transcript.say("Is this node fit to train? Status 1 says that there is something to read.")
    transcript.type("hangwatch check", statuses=(0, 1))


def watch(transcript: Transcript) -> None:
    transcript.say(
        "## Prometheus and Alertmanager",
        "Rules and examples as they are in the repository. The webhook needs no secret; Slack and PagerDuty are added, "
        "at addresses of this machine.",
    )
    prometheus, alertmanager = Path("/etc/prometheus/prometheus.yml"), Path("/etc/prometheus/alertmanager.yml")
    transcript.type(
        "cp hangwatch/deploy/prometheus/{hangwatch.rules.yaml,hangwatch-site.rules.yaml,hangwatch.tmpl} /etc/prometheus/"
    )
    example = (CHECKOUT / "deploy/prometheus/prometheus.example.yaml").read_text()
    prometheus.write_text(example.replace('["node-1:9836", "node-2:9836"]', '["gpu-07:9836"]'))
    example = (CHECKOUT / "deploy/prometheus/alertmanager.example.yaml").read_text()
    example = re.sub("(?m)^( +)#(slack|pagerduty) ", r"\1", example)
    example = re.sub(r"api_url_file: .*", f"api_url: {PAGES}/slack", example)
    key = f"routing_key: {'0' * 32}\n        url: {PAGES}/pagerduty"
    example = re.sub(r"routing_key_file: .*", key, example)
    alertmanager.write_text(example)
    transcript.type(
        "diff hangwatch/deploy/prometheus/prometheus.example.yaml /etc/prometheus/prometheus.yml", statuses=(1,)
    )
    transcript.type(
        "diff hangwatch/deploy/prometheus/alertmanager.example.yaml /etc/prometheus/alertmanager.yml", statuses=(1,)
    )
    transcript.type(
        "promtool check config /etc/prometheus/prometheus.yml && amtool check-config /etc/prometheus/alertmanager.yml | head -1"
    )
    # Alertmanager searches for peers in a private network, and exits without one.
    assert not Path("/etc/alertmanager").exists(), "a secret of Alertmanager"
    Path("/etc/default/prometheus-alertmanager").write_text('ARGS="--cluster.listen-address="\n')
    transcript.type(
        "systemctl restart prometheus prometheus-alertmanager; sleep 3; systemctl is-active prometheus prometheus-alertmanager"
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PAGES_PORT), Services)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def train(transcript: Transcript) -> list[int]:
    transcript.say(
        "## A job of another user",
        "User `trainer` starts a job; its program is tests/first_hour/train.py. Nothing in it knows of hangwatch.",
    )
    subprocess.run(["useradd", "--create-home", "--uid", "1004", "--shell", "/bin/bash", "trainer"], check=True)
    shutil.copy(CHECKOUT / "tests/first_hour/train.py", HOME)
    (HOME / "data").mkdir()
    for rank in range(RANKS):
        (HOME / f"data/shard-{rank}").write_bytes(bytes(range(64)))
    subprocess.run(["chown", "-R", "trainer:", HOME], check=True)
    subprocess.run(["chmod", "0700", HOME], check=True)
    print(
        subprocess.run(
            [
                "su",
                "-",
                "trainer",
                "-c",
                f"python3 -m venv venv && venv/bin/pip install -q --no-index --find-links {GIVEN}/torch torch numpy",
            ],
            capture_output=True,
            text=True,
        )
    )
    pids = start_job(transcript)
    set_power([612.0, 605.0, 598.0, 609.0], pids)
    within(60, is_in_state("training"), "the daemon sees it train")
    time.sleep(60)
    transcript.type("hangwatch status")
    transcript.result("a user starts a job of four ranks", "`training`")
    return pids


def start_job(transcript: Transcript) -> list[int]:
    transcript.type(TORCHRUN, user="trainer")
    within(120, lambda: len(ranks()) == RANKS, "the ranks are there")
    within(120, lambda: "step" in (HOME / "train.log").read_text(), "the job makes steps")
    return ranks()


def stop_data() -> None:
    """Replace the data of rank 3 by a FIFO, which blocks its reader like a file server that does not respond."""
    shard = HOME / "data/shard-3"
    os.mkfifo(shard.with_name("stuck"))
    os.chown(shard.with_name("stuck"), 1004, 1004)
    shard.with_name("stuck").rename(shard)


def mend_data() -> None:
    shard = HOME / "data/shard-3"
    fifo = shard.with_name("stuck")
    shard.rename(fifo)  # before the write: the process that reads it must find a file the next time
    shutil.copy(shard.with_name("shard-0"), shard)
    os.chown(shard, 1004, 1004)
    fifo.write_bytes(bytes(range(64)))
    fifo.unlink()


def hang(transcript: Transcript, pids: list[int]) -> None:
    transcript.say(
        f"## {clock(transcript)} It hangs",
        "The file server of rank 3's data stops answering. Power falls; nothing is printed anywhere, and all processes live.",
    )
    stop_data()
    time.sleep(3)
    set_power([118.0, 121.0, 117.0, 88.0], pids)
    transcript.type("tail -1 train.log; pgrep --count python", user="trainer")
    began = time.monotonic()
    within(200, lambda: pages() and Services.to("pagerduty"), "the page")
    seconds = time.monotonic() - began
    transcript.say(f"## {clock(transcript)} The page", f"It came {seconds:.0f} seconds after power fell. In Slack:")
    transcript.result("the data of rank 3 stops; power falls", f"page in Slack and PagerDuty {seconds:.0f} s later")
    (attachment,) = pages()[0]["attachments"]
    _, description, links = attachment["text"].split("```")
    transcript.since = re.search(r"Since: ([\d-]+ [\d:]+) UTC", description)[1]
    transcript.quote(attachment["title"], [("The title leads to", attachment["title_link"]), ("Text", description)])
    transcript.text += "> " + re.sub(r"<([^|<>]+)\|([^<>]+)>", r"[\2](\1)", links.strip()) + "\n\n"
    event = Services.to("pagerduty")[0]
    transcript.say("In PagerDuty, with the same text as details:")
    links = [(link["text"], link["href"]) for link in event["links"]]
    rows = [("Severity", event["payload"]["severity"]), (f"{event['client']} leads to", event["client_url"]), *links]
    transcript.quote(event["payload"]["summary"], rows)


def clock(transcript: Transcript) -> str:
    passed = int(time.monotonic() - transcript.started)
    return f"{passed // 60:02d}:{passed % 60:02d}"


def read(transcript: Transcript) -> None:
    transcript.say(f"## {clock(transcript)} The report", "The on-call types the command of the page:")
    page = json.dumps(pages()[0])
    command = re.search(r"(sudo )?hangwatch report[\w .:/=-]*", page)
    assert command, "the page has no command"
    printed = transcript.type(command[0].removeprefix("sudo ").strip())
    assert f"no progress since {transcript.since} UTC" in printed, "the report tells another start than the page"
    assert ", paged at " in printed
    evidence = " ".join(printed.split())
    assert 'read_shard (train.py:21): with open(path, "rb") as shard' in evidence
    assert re.search(r"the working directory of rank 3 \([^()]+\) is /home/trainer", evidence)
    check_starts(transcript, printed)
    (path,) = re.findall(r"Do first +look at (/\S+):", printed)
    transcript.say("The file of the report, and whether it answers:")
    transcript.type(f"ls -l {path} && hangwatch check storage --path {path}", statuses=(0, 1))
    transcript.say("The hook ran:")
    transcript.type("hangwatch report | grep hook; ls /var/lib/hangwatch/copies/gpu-07/*")
    transcript.say("The owner of the job reads the same, without root:")
    listed = transcript.type("hangwatch incidents; hangwatch report | head -12", user="trainer")
    assert re.sub(r"(\d) (\d)", r"\1T\2", re.sub("[-:]", "", transcript.since)) + "Z" in listed, listed
    transcript.say("Other users are refused:")
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", "stranger"], check=True)
    transcript.type("hangwatch incidents", user="stranger", statuses=(0, 1, 2))
    verdict = " ".join(printed.split("=====")[0].split())
    assert verdict.startswith("Rank 3 ") and "its worker" in verdict and "data/shard-3" in verdict, verdict
    named = "rank 3 is named, with its worker and the file data/shard-3"
    transcript.result("root and the job's owner read the report, another user cannot", named)
    told = [body for path, body in Services.received if path == "/on-call"]
    assert any("HangwatchTrainingHung" in json.dumps(body) for body in told), (
        "the receiver of the example, without secrets"
    )
    assert "HangwatchNodeHasHungJob" not in json.dumps(Services.received), "a warning that the page holds back"
    places = "page, incident, report, its timeline, `status` and the metric"
    transcript.result("each place tells one start of the hang", f"{places}: {transcript.since[-8:]} UTC")
    transcript.result("the file of the page is looked at", "`ls` and `check storage` find it")


def check_starts(transcript: Transcript, report: str) -> None:
    """Assert that the status, the metric and the timeline of a report tell the start of the hang that the page tells."""
    began = datetime.fromisoformat(f"{transcript.since}+00:00")
    with urllib.request.urlopen("http://127.0.0.1:9836/metrics", timeout=5) as answer:
        (quiet,) = re.findall(r"(?m)^hangwatch_job_quiet_seconds\{.*\} (\S+)", answer.read().decode())
    starts = {"metric": datetime.now(timezone.utc) - timedelta(seconds=float(quiet))}
    status = " ".join(transcript.type("hangwatch status | grep -A 8 ^llama").split())
    for place, told in (
        ("status", re.findall(r"no progress since ([\d:]+) UTC", status)),
        ("timeline", re.findall(r"(?m)^\S+ ([\d:]+) UTC .*the last progress of the job", report)),
    ):
        assert len(told) == 1, f"{place} tells {len(told)} starts"
        starts[place] = datetime.combine(began.date(), datetime.strptime(f"{told[0]}+0000", "%H:%M:%S%z").timetz())
    for place, start in starts.items():
        assert abs(start - began) < timedelta(seconds=2), f"{place}: {start}, the page: {began}"


def mend(transcript: Transcript) -> None:
    transcript.say(f"## {clock(transcript)} It goes on", "The report says which file it is. The file server is mended.")
    before = len(pages())
    mend_data()
    set_power([612.0, 605.0, 598.0, 609.0], ranks())
    within(120, is_in_state("recovered"), "recovered")
    within(180, lambda: len(pages()) > before, "Slack hears of it")
    transcript.say("Slack:")
    (attachment,) = pages()[-1]["attachments"]
    assert f"Since: {transcript.since} UTC" in attachment["text"], "the resolved message tells another start"
    transcript.quote(attachment["title"], [("Since", f"{transcript.since} UTC")])
    transcript.type("hangwatch incidents; hangwatch status")
    transcript.result("the data is back", "`recovered`, the page is resolved")


def without_gpus(transcript: Transcript) -> None:
    transcript.say(
        f"## {clock(transcript)} A node without GPUs",
        "The driver is removed and the job started again: only its collectives are left to be counted.",
    )
    subprocess.run(["pkill", "-u", "trainer"], check=True)
    within(60, lambda: not ranks(), "the ranks end")
    DROP_IN.unlink()
    Path("/usr/lib/libnvidia-ml.so.1").unlink()
    subprocess.run("ldconfig; systemctl daemon-reload; systemctl restart hangwatch", shell=True, check=True)
    start_job(transcript)
    within(60, lambda: "learning:" in status(), "the collectives are counted")
    learning = " ".join(transcript.type("hangwatch status | sed '/^check/,$d'").split())
    assert re.search(r"learning: \d+ collectives so far", learning), learning
    assert "detects no hang" not in status(), "the status denies what the daemon can do"
    within(300, is_in_state("training"), "the daemon sees it train")
    before = len(pages())
    stop_data()
    began = time.monotonic()
    within(240, lambda: len(pages()) > before, "the page without GPUs")
    seconds = time.monotonic() - began
    (attachment,) = pages()[-1]["attachments"]
    transcript.quote(attachment["title"], [])
    assert "rank 3 on gpu-07: open data/shard-3" in attachment["title"], attachment["title"]
    within(60, is_in_state("hung"), "hung")
    time.sleep(60)  # longer than HangwatchBlind would take from the start of the hang
    with urllib.request.urlopen("http://127.0.0.1:9090/api/v1/alerts", timeout=5) as answer:
        names = {alert["labels"]["alertname"] for alert in json.load(answer)["data"]["alerts"]}
    assert "HangwatchBlind" not in names and "HangwatchBlind" not in json.dumps(Services.received), names
    mend_data()
    within(120, is_in_state("recovered"), "recovered")
    blind = f"`learning`, `training`; page {seconds:.0f} s after the hang; HangwatchBlind is silent"
    transcript.result("the same without GPUs, by collectives alone", blind)


def status() -> str:
    return subprocess.run(["hangwatch", "status"], capture_output=True, text=True, check=False).stdout


STEPS = (machine, install, watch)


def main() -> int:
    told = Transcript()
    try:
        for step in STEPS:
            step(told)
        pids = train(told)
        hang(told, pids)
        read(told)
        mend(told)
        without_gpus(told)
        (OUT / "first-hour.md").write_text(told.text.rstrip() + "\n")
        (OUT / "first-hour.table").write_text(told.results)
        return 0
    except BaseException:
        traceback.print_exc()
        shutil.copytree("/var/lib/hangwatch", OUT / "state", symlinks=True)
        subprocess.run(
            "systemctl status hangwatch --no-pager; journalctl -u hangwatch --no-pager | tail -40; tail -20 /home/trainer/train.log; cat /proc/loadavg",
            shell=True,
        )
        (OUT / "first-hour.part.md").write_text(told.text)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    subprocess.run(["systemctl", "exit", str(status)])
    time.sleep(600)
