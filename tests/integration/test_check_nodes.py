"""`hangwatch check --nodes`, with real processes in place of nodes. A "node" is only a name (`--via local`)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hangwatch.checks.framework import result_table
from hangwatch.checks.framework.node_facts import Facts, JobVersions
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict
from tests.integration.test_dump_nodes import PRINTED
from tests.integration.test_hostile_input import hangwatch, refused
from tests.schemas import path as schema_path

LINKS = CheckVerdict(
    status=CheckStatus.CRITICAL, reason="LinksDown", message="2 links of GPU 3 are down", remedy="reseat GPU 3"
)
LIMIT = CheckVerdict(status=CheckStatus.WARNING, reason="LowLimit", message="slurmd has 1024", remedy="raise it")


def answer_of(
    *verdicts: tuple[str, CheckVerdict], driver: str = "550.54", torch: str = "2.5.1", key: str = "k1"
) -> dict[str, Any]:
    well = CheckVerdict(status=CheckStatus.OK, reason="Well", message="all is well")
    results = [
        CheckResult(check=name, verdict=verdict, success=True, duration_seconds=0.1, ran_unix_seconds=1.0)
        for name, verdict in (("clock_skew", well), *verdicts)
    ]
    facts = Facts(node={"driver": driver, "kernel": "6.8"}, jobs=(JobVersions("train", key, {"torch": torch}),))
    text = result_table.to_json(results, "liar", facts=facts, began_unix_seconds=PRINTED, printed_unix_seconds=PRINTED)
    return json.loads(text)


def keep(folder: Path, node: str, answer: dict[str, Any], ahead_seconds: int = 0) -> None:
    (folder / node).write_text(json.dumps(answer, indent=2) + "\n")
    (folder / f"{node}.ahead").write_text(str(ahead_seconds))


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Return a folder in which `answer NODE` prints the output of n1 to n8, healthy and equal."""
    for number in range(1, 9):
        keep(tmp_path, f"n{number}", answer_of())
    remote(tmp_path, "print")
    return tmp_path


def remote(folder: Path, script: str) -> None:
    """Write the script that `answer NODE` runs. `print` in it prints the output with a clock ahead."""
    now = '$(date -d "$(cat "$folder/$node.ahead") seconds" +%s.%N)'
    printing = f'sed "s/{PRINTED}/{now}/g" "$folder/$node"'
    (folder / "answer").write_text(f"node=$1\nfolder={folder}\nprint() {{ {printing}; }}\n{script}\n")


def ask(folder: Path, *arguments: str, nodeset: str = "n[1-8]") -> subprocess.CompletedProcess[str]:
    command = ("--via", "local", "--deadline", "60", "--remote-command", f"sh {folder}/answer %h")
    return hangwatch("check", "--nodes", nodeset, *command, *arguments)


def parse_output(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(form, json.loads(schema_path("check_nodes").read_text()))
    assert form["exit_code"] == done.returncode, done.stderr
    return form


def test_nodes_with_equal_answers_stand_in_one_line_worst_first(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    for node in ("n3", "n4"):
        keep(nodes, node, answer_of(("fd_limit", LIMIT)))
    keep(nodes, "n8", answer_of(("nvlink_status", LINKS)))
    done = ask(nodes)
    assert done.returncode == 2, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.split() == ["CRITICAL", "nvlink_status", "n8:", "LinksDown:", *LINKS.message.split()]
    assert [line.split()[:3] for line in rest if not line.startswith(" ")] == [
        ["WARNING", "fd_limit", "n[3-4]:"],
        ["OK", "1", "check"],
    ]
    assert rest[-1].endswith("n[1-2,5-7]")
    form = parse_output(ask(nodes, "--json"))
    assert (form["status"], form["well"], form["differences"]) == ("CRITICAL", ["n1", "n2", "n5", "n6", "n7"], [])
    assert form["findings"][0]["nodes"] == ["n8"]
    assert ask(nodes, "--fail-on", "critical", nodeset="n[1-4]").returncode == 0


def in_one_line(printed: str) -> str:
    """Join the lines of the output, so that the width of the terminal does not matter."""
    return " ".join(printed.split())


def test_what_should_be_the_same_and_is_not_is_a_finding(nodes: Path) -> None:
    keep(nodes, "n8", answer_of(driver="535.1"))
    keep(nodes, "n7", answer_of(torch="2.4.0"))
    keep(nodes, "n6", answer_of(torch="1.0", key="of another job"))
    done = ask(nodes)
    assert done.returncode == 1
    shown = in_one_line(done.stdout)
    assert "driver 550.54 on n[1-7], 535.1 on n8" in shown
    assert "change n8 to 550.54" in shown
    assert "torch of job train 2.5.1 on n[1-5,8], 2.4.0 on n7" in shown
    assert "kernel" not in shown
    form = parse_output(ask(nodes, "--json"))
    (driver, torch) = form["differences"]
    assert [held["nodes"] for held in driver["values"]] == [[f"n{number}" for number in range(1, 8)], ["n8"]]
    assert (torch["fact"], torch["job"]) == ("torch", "train")


def test_two_nodes_with_different_values_are_both_reported(nodes: Path) -> None:
    keep(nodes, "n2", answer_of(driver="535.1"))
    (finding,) = parse_output(ask(nodes, "--json", nodeset="n[1-2]"))["findings"]
    assert (finding["nodes"], "use the same value" in finding["remedy"]) == (["n1", "n2"], True)


def test_numbers_that_differ_are_one_line_unless_all_are_asked_for(nodes: Path) -> None:
    for number in range(1, 9):
        verdict = CheckVerdict(
            status=CheckStatus.WARNING, reason="LowLimit", message=f"slurmd has {1024 + number}", remedy="raise it"
        )
        keep(nodes, f"n{number}", answer_of(("fd_limit", verdict)))
    (finding,) = parse_output(ask(nodes, "--json"))["findings"]
    assert (len(finding["nodes"]), "and 7 similar messages" in finding["message"]) == (8, True)
    assert len(parse_output(ask(nodes, "--json", "--verbose"))["findings"]) == 8


def test_clocks_of_nodes_are_compared_with_the_local_clock(nodes: Path) -> None:
    keep(nodes, "n2", answer_of(), ahead_seconds=3600)
    keep(nodes, "n3", answer_of(), ahead_seconds=-3600)
    form = parse_output(ask(nodes, "--json"))
    clocks = {offset["node"]: offset["seconds"] for offset in form["clocks"] if abs(offset["seconds"]) > 1000}
    assert set(clocks) == {"n2", "n3"}
    assert 3000 < clocks["n2"] <= 3600
    assert -3600 <= clocks["n3"] < -3000
    assert form["status"] == "CRITICAL"
    assert "ahead of the clock of the node that ran" in in_one_line(ask(nodes).stdout)


def test_what_no_node_would_say_costs_its_node_alone(nodes: Path) -> None:
    remote(
        nodes,
        """case $node in
n1) exit 2;;
n2) echo '{"schema_version": 1}';;
n3) printf '{"schema_version": 1, "printed_unix_seconds": 1e999, "checks": []}';;
n4) printf '{"schema_version": 1, "printed_unix_seconds": 1, "checks": [], "facts": {"node": {'
    seq -s, 2000 | sed 's/[0-9]*/"&": "1"/g'; echo '}, "jobs": []}}';;
n5) exec /nonexistent/hangwatch;;
n6) head -c 100000000 /dev/zero;;
*) print;;
esac""",
    )
    escape = CheckVerdict(status=CheckStatus.WARNING, reason="\x1b[2J", message="\x1b[2J" * 1000, remedy="")
    keep(nodes, "n7", answer_of(("\x1b[2J", escape)))
    form = parse_output(ask(nodes, "--json"))
    assert form["answered"] == ["n7", "n8"], form["failed"]
    reasons = {node: failed["reason"] for failed in form["failed"] for node in failed["nodes"]}
    assert "exit code 2" in reasons["n1"]
    assert "not the output of `hangwatch check --json`" in reasons["n2"]
    assert "--remote-command" in reasons["n5"]
    assert "more than 32 MiB" in reasons["n6"]
    shown = ask(nodes)
    assert "\x1b" not in shown.stdout + shown.stderr
    assert len(shown.stdout) < 8000
    assert shown.returncode == 1


def test_nodes_of_which_nothing_is_known_are_unknown(nodes: Path) -> None:
    remote(nodes, 'if [ "$node" = n1 ]; then exit 124; fi; exit 70')
    done = ask(nodes, nodeset="n[1-3]")
    assert done.returncode == 3
    assert "n1: Unanswered" in in_one_line(done.stdout)
    assert "n[2-3]: NoAnswer: hangwatch ended with exit code 70" in in_one_line(done.stdout)


def test_options_that_do_not_go_together(nodes: Path) -> None:
    config = nodes / "some.toml"
    config.write_text("")
    done = hangwatch("check", "--nodes", "a", "--config", str(config))
    assert (done.returncode, "Usage" in done.stderr) == (2, True)
    refused("check", "nosuch", "--nodes", "a", "--via", "local", says="there is no check 'nosuch'")


def test_the_real_command_is_what_answers() -> None:
    done = hangwatch(
        "check", "memory_pressure", "--nodes", "one,two", "--via", "local", "--json", "--deadline", "150",
        "--remote-command", f"{sys.executable} -m hangwatch",
    )  # fmt: skip
    form = parse_output(done)
    assert form["answered"] == ["one", "two"], done.stderr
    assert form["differences"] == []
    assert [offset for offset in form["clocks"] if abs(offset["seconds"]) > 1] == []


def test_a_node_tells_what_nodes_are_compared_by() -> None:
    report = json.loads(hangwatch("check", "memory_pressure", "--json").stdout)
    assert {"hangwatch", "kernel", "open_files_limit", "locked_memory_limit_bytes"} <= set(report["facts"]["node"])
    assert report["began_unix_seconds"] < report["printed_unix_seconds"]
