"""The runbooks and docs/tuning.md: reasons and keys exist, and the steps for a job's author work on torchrun."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from hangwatch import config
from hangwatch.tools.commands.explain import explain
from tests.commands import Finished, finished
from tests.conftest import wait_for
from tests.deploy.promql import ROOT
from tests.deploy.test_links import blocks, typed
from tests.integration import targets

AUTHOR = ROOT / "docs/runbooks/when-the-verdict-is-not-enough.md"

MISMATCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
for step in range(3):
    print(f"step {step}", flush=True)
    if MISMATCH and dist.get_rank() == 1 and step == 2:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)
dist.destroy_process_group()
"""


def test_the_reasons_that_a_runbook_explains_are_those_of_the_check() -> None:
    checks = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/checks.md").read_text(), re.DOTALL | re.MULTILINE)
    )
    runbook = (ROOT / "docs/runbooks/HangwatchNodeUnhealthy.md").read_text()
    seen = 0
    for check, section in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", runbook, re.DOTALL | re.MULTILINE):
        for reasons in re.findall(r"^\* \*([^*]+)\*:", section, re.MULTILINE):
            for reason in reasons.split(", "):
                assert f"`{reason}`" in checks[check], f"{check} has no reason {reason}"
                seen += 1
    assert seen >= 10


DEFAULTS_ROW = re.compile(r"^\| (`[^|]+`) \| ([\d., \[\]]+|true|false|\"[^\"]+\") \|", re.MULTILINE)
SECTIONS = {
    "[detector]": config.Detector(),
    "[progress]": config.Progress(),
    "[capture]": config.Capture(),
}


@pytest.mark.golden
def test_tuning_page_explains_each_key_with_its_default() -> None:
    # `make golden` writes the defaults of config.py into the page.
    page = ROOT / "docs/tuning.md"
    renewed = page.read_text()
    for heading, section in SECTIONS.items():
        before, _, rest = renewed.partition(f"### `{heading}`")
        part, end, after = rest.partition("\n###")
        keys = [key for names, _ in DEFAULTS_ROW.findall(part) for key in re.findall(r"`(\w+)`", names)]
        assert {field.name for field in msgspec.structs.fields(section)} <= set(keys), f"{heading}: a key is missing"
        rows = DEFAULTS_ROW.sub(lambda row, section=section: _default_row(row, section), part)
        renewed = f"{before}### `{heading}`{rows}{end}{after}"
    if os.environ.get("HANGWATCH_RENEW_GOLDEN"):
        page.write_text(renewed)
    assert page.read_text() == renewed, "run `make golden` and read the diff"


def _default_row(row: re.Match[str], section: msgspec.Struct) -> str:
    """Return the first two cells of a row with the present defaults. A cell with equal values stays as it is."""
    names, cell = row.groups()
    defaults = json.loads(msgspec.json.encode([getattr(section, key) for key in re.findall(r"`(\w+)`", names)]))
    if defaults != json.loads(f"[{cell}]"):
        texts = (f"{value:g}" if isinstance(value, float) else json.dumps(value) for value in defaults)
        cell = ", ".join(texts)
    return f"| {names} | {cell} |"


@pytest.mark.torch
def test_runbook_settings_prefix_logs_compare_collectives_and_record_errors(tmp_path: Path) -> None:
    """Follow sections 1, 2 and 7 of the runbook, and use the loopback device of section 12, in one job."""
    recorded = snippet("import faulthandler\n")
    body = textwrap.indent(MISMATCH.replace("MISMATCH", "True", 1), "    ")
    (tmp_path / "train.py").write_text(recorded.replace(" ...", body) + "\nmain()\n")
    done = _torchrun(
        tmp_path,
        ["--log-dir", "logs", "--tee", "3", "train.py"],
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[node-1:${rank}] ",
        **variables("NCCL_SOCKET_IFNAME=lo"),
    )
    assert done.returncode != 0
    assert {"[node-1:0] step 2", "[node-1:1] step 2"} <= set(done.stdout.splitlines())
    assert "Detected mismatch between collectives on ranks" in done.stderr
    assert len(list(tmp_path.glob("logs/*/attempt_0/[01]/stdout.log"))) == 2
    errors = [json.loads(path.read_text()) for path in tmp_path.glob("logs/*/attempt_0/[01]/error.json")]
    assert errors
    assert all("Detected mismatch" in error["message"]["message"] for error in errors), errors


INIT = (
    "Bootstrap : Using {interface}:10.0.0.7<0>",
    "NET/Plugin: No plugin found (libnccl-net.so)",
    "cudaDriverVersion 12080",
    "NCCL version 2.27.3+cuda12.8",
    "Using network Socket",
    "ncclCommInitRankConfig comm 0x55d0c8a1b2c0 rank {rank} nranks 4 cudaDev {device} busId 1b000 commId 0xab - Init START",
)
TROUBLE = "NET/IB: Got completion from peer 10.2.0.5<33092> with status=12 opcode=129 len=524288 vendor err 129"


@pytest.mark.parametrize(
    ("interfaces", "trouble", "expected_texts"),
    [
        (("eth0", "docker0"), "", ["interface of NCCL's bootstrap: docker0 on", "gpu-b"]),
        (("eth0", "eth0"), TROUBLE, ["an InfiniBand or RoCE peer did not respond", "Rank 1 (gpu-a, pid 4123)"]),
        (("eth0", "eth0"), "", ["4 ranks of 4 began to create a communicator of NCCL, 0 finished"]),
    ],
)
def test_nccl_recipe_of_the_runbook_is_explained(
    interfaces: tuple[str, str], trouble: str, expected_texts: list[str], tmp_path: Path
) -> None:
    """Write NCCL's own lines to files of the names that the runbook sets, and type its next command there."""
    pattern = variables("NCCL_DEBUG=INFO")["NCCL_DEBUG_FILE"]
    for rank, (host, pid) in enumerate((("gpu-a", 4122), ("gpu-a", 4123), ("gpu-b", 4122), ("gpu-b", 981))):
        interface, device = interfaces[host == "gpu-b"], rank % 2
        head = f"{host}:{pid}:{pid} [{device}] NCCL INFO "
        lines = [head + line.format(interface=interface, rank=rank, device=device) for line in INIT]
        if trouble and rank == 1:
            lines.append(
                f"\n[2026-11-20 14:02:11] {host}:{pid}:{pid + 9} [{device}] net_ib.cc:1296 NCCL WARN {trouble}"
            )
        (tmp_path / pattern.replace("%h", host).replace("%p", str(pid))).write_text("\n".join(lines) + "\n")
    typed = shell_line("hangwatch explain nccl").replace("hangwatch", f"{sys.executable} -m hangwatch", 1)
    done = finished("bash", "-c", typed, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    shown = " ".join(done.stdout.split())
    assert all(text in shown for text in expected_texts), done.stdout
    assert "<- named" not in shown and "Check first" not in shown


@pytest.mark.torch
def test_error_file_without_torchrun_leads_explain_to_the_cause(tmp_path: Path) -> None:
    """Follow section 7 under srun: tasks have numbers and the same folder."""
    recorded = snippet("import faulthandler\n")
    body = "\n    import os, time\n    if os.environ['RANK'] == '1': time.sleep(1.5)\n"
    body += "    raise ValueError('shard of ' + os.environ['RANK'])"
    (tmp_path / "train.py").write_text(recorded.replace(" ...", body) + "\nmain()\n")
    line = shell_line("srun sh -c").removeprefix("srun ").replace("python", sys.executable)
    for rank in "01":
        environ = {**os.environ, "SLURM_PROCID": rank, "RANK": rank}
        done = finished("bash", "-c", line, cwd=tmp_path, env=environ)
        assert done.returncode != 0 and "ValueError" in done.stderr
    told = CliRunner().invoke(explain, [str(tmp_path), "--json"])
    verdict = json.loads(told.stdout)["verdict"]
    assert "shard of 0" in json.dumps(verdict), verdict


@pytest.mark.torch
def test_the_line_tracer_of_the_page_follows_one_file(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(\"\"\"Print every line.*?)```", AUTHOR.read_text(), re.DOTALL)
    (tmp_path / "follow.py").write_text(source)
    (tmp_path / "train.py").write_text(MISMATCH.replace("MISMATCH", "False", 1))
    hidden = variables('CUDA_VISIBLE_DEVICES=""')  # from section 10: the same program without GPUs
    done = _torchrun(tmp_path, ["-m", "follow", "train.py"], FOLLOW="train.py", **hidden)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"\[\S+:([01])\] [\d.]+ <module> \S*train\.py:(\d+) line", done.stderr)
    assert {rank for rank, _ in lines} == {"0", "1"}
    assert "distributed_c10d.py" not in done.stderr


READER = """
import faulthandler, os, signal, sys
REGISTER
def read_shard():
    print("ready", flush=True)
    os.read(0, 1)
read_shard()
"""


@contextlib.contextmanager
def reader(folder: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process after the shell lines of the page. It waits in read(0, ...). Yield it."""
    (line,) = re.findall(r"`(faulthandler\.register\(.*?\))`", AUTHOR.read_text())
    (folder / "train.py").write_text(READER.replace("REGISTER", line))
    shell = "\n".join([*before, f"exec {sys.executable} train.py"])
    with subprocess.Popen(
        ["bash", "-c", shell], cwd=folder, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(folder / "stderr.log").open("w"),
    ) as process:  # fmt: skip
        assert process.stdout
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        wait_for(lambda: targets.state(process.pid) == "S", "it to wait in read()")
        try:
            yield process
        finally:
            process.kill()


def test_a_signal_makes_the_program_print_its_stacks_and_explain_reads_them(tmp_path: Path) -> None:
    with reader(tmp_path) as process:
        subprocess.run(["bash", "-c", shell_line("kill -USR1 PID").replace("PID", str(process.pid))], check=True)
        log = tmp_path / "stderr.log"
        wait_for(lambda: "<module>" in log.read_text(), "the stack")
    told = CliRunner().invoke(explain, [str(log)])
    assert "read_shard" in told.output, told.output


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_gdb_shows_where_a_core_died(tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/")):
        pytest.skip("cores go to a program or a folder of the machine here")
    with reader(tmp_path, shell_line("ulimit -c unlimited")) as process:
        process.send_signal(signal.SIGABRT)
        process.wait(60)
    (core,) = [path for path in tmp_path.iterdir() if path.name.startswith("core")]
    line = shell_line("gdb -batch").replace("python core", f"{sys.executable} {core}")
    done = finished("bash", "-c", line, timeout=200, check=True)
    assert "Program terminated with signal SIGABRT" in done.stdout
    assert re.search(r"^#\d+ .*\bread\b", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_strace_shows_the_call_that_blocks_a_thread_as_an_open_line(tmp_path: Path) -> None:
    with reader(tmp_path) as process:
        line = shell_line("strace -f -tt -p PID").replace("PID", str(process.pid))
        log = tmp_path / "strace.log"
        with log.open("w") as written, subprocess.Popen(["bash", "-c", f"exec {line}"], stderr=written) as tracer:
            wait_for(lambda: "read(0" in log.read_text() or tracer.poll() is not None, "the open line")
            tracer.terminate()
        assert re.search(r"read\(0, ", log.read_text()), log.read_text()
        assert process.poll() is None


def snippet(beginning: str) -> str:
    """Return the program on the page that starts with `beginning`."""
    (found,) = [text for text in blocks(AUTHOR, "python") if text.startswith(beginning)]
    return found


def shell_line(beginning: str) -> str:
    """Return the command on the page that starts with `beginning`, from a code block or the text."""
    (found,) = {line for line in typed(AUTHOR) if line.startswith(beginning)}
    return found


def variables(beginning: str) -> dict[str, str]:
    """Return the environment variables that the command which starts with `beginning` sets."""
    words = shlex.split(shell_line(beginning))
    return dict(word.split("=", 1) for word in words[: words.index("torchrun")])


def _torchrun(folder: Path, arguments: list[str], **environ: str) -> Finished:
    return finished(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *arguments,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environ},
    )
