#!/usr/bin/env bash
# tool: ClusterShell 1.10.1, beside python-hostlist 2.3.0
# finding: ClusterShell joins digits in front of a bracket to both ends of the range; hostlist (like Slurm) does not
# last run: 2026-11-28
#
# dummy26[1-100] is a list of 100 nodes for Slurm, whose commands print such lists. NodeSet makes 25,840 nodes of it
# (261 to 26100), without a warning. A script that feeds one tool with the list of the other reaches other nodes.
. "$(dirname "$0")/lib.sh"
install ClusterShell==1.10.1 python-hostlist==2.3.0
"$python" - <<'PY' | expect 'dummy26[1-100]: ClusterShell 25840, hostlist 100'
from ClusterShell.NodeSet import NodeSet
from hostlist import expand_hostlist

for text in ("dummy26[1-100]", "node2[0-15]", "dgx-h100[1-32]"):
    print(f"{text}: ClusterShell {len(NodeSet(text))}, hostlist {len(expand_hostlist(text))}")
PY
