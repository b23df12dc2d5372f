"""`hangwatch check --nodes`: checks on many nodes, and the differences between these nodes."""

import shlex
from collections.abc import Sequence

from hangwatch import words
from hangwatch.checks.framework import result_table
from hangwatch.cli.reach import Reach
from hangwatch.cli.text_tables import print_checks
from hangwatch.model import CheckStatus
from hangwatch.report import as_json
from hangwatch.tools.commands.node_options import MOST_NAME_CHARACTERS, resolve_nodes, run_hangwatch
from hangwatch.tools.commands.output import print_nodes_answer
from hangwatch.tools.fleet import fitness
from hangwatch.tools.fleet.cross_node import ClockOffset


class NodesCheck(as_json.NodesAnswer, frozen=True):
    """The output of `hangwatch check --nodes ... --json`: findings on many nodes, and differences between them.

    `well` are the nodes on which every check was OK. `unanswered` are the nodes that did not respond by the deadline
    or could not be reached. `findings` includes differences, clocks and nodes that did not respond.
    """

    status: result_table.Status
    exit_code: int
    well: tuple[str, ...]
    findings: tuple[fitness.Finding, ...]
    differences: tuple[fitness.Difference, ...]
    clocks: tuple[ClockOffset, ...]


def check_nodes(
    reach: Reach,
    names: Sequence[str],
    fail_on: result_table.FailOn | None,
    *,
    as_json_form: bool,
    verbose: bool,
) -> int:
    """Check many nodes at the same time and print the findings. Return the exit code for the most severe finding."""
    replies, nodes = fitness.collect_replies(), resolve_nodes(reach)
    arguments = shlex.join(("check", "--json", *names))
    reports = run_hangwatch(reach, nodes, arguments, replies)
    node_findings = fitness.findings(reports, every_wording=verbose)
    differences = fitness.differences(reports)
    cross_findings = [*map(fitness.difference_finding, differences), *fitness.clock_findings(replies.clocks)]
    findings = fitness.sort_findings((*node_findings, *cross_findings, *fitness.absent_findings(replies)))
    well = sorted(set(reports) - {node for finding in node_findings for node in finding.nodes})
    status = fitness.worst_status(findings)
    exit_code = result_table.status_exit_code(CheckStatus[status], fail_on)
    if as_json_form:
        print_nodes_answer(
            NodesCheck,
            replies,
            status=status,
            exit_code=exit_code,
            well=tuple(well),
            findings=tuple(findings),
            differences=tuple(differences),
            clocks=tuple(replies.clocks),
        )
        return exit_code
    rows = [
        (
            finding.check,
            finding.status,
            "",
            f"{_folded(finding.nodes)}: {finding.reason}: {finding.message}",
            finding.remedy,
        )
        for finding in findings
    ]
    if well:
        checks = max(len(reports[node].checks) for node in well)
        rows.append((words.count(checks, "check"), "OK", "", _folded(well), ""))
    print_checks(rows)
    return exit_code


def _folded(nodes: Sequence[str]) -> str:
    return words.elided(words.fold_nodes(nodes), MOST_NAME_CHARACTERS)
