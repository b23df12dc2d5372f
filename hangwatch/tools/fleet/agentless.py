"""Dumps of nodes without hangwatch: a shell command that runs py-spy on ranks, and the parser of its output. Pure.

A Python process with RANK in its environment is a rank, unless its parent is a Python process of the same rank:
then it is a loader worker. If the command cannot read an environment, the children of torchrun are ranks without a
number.
"""

import base64
import binascii
import re
import shlex
from collections import defaultdict
from typing import NamedTuple

import msgspec

from hangwatch.limits import MOST_RANKS
from hangwatch.tools.fleet.node_replies import AnswerError, ReplyCollector, parse_answer

MOST_PROCESSES = 512  # of one node
MOST_TEXT_BYTES = 400_000  # of one process and round

# A script for any POSIX sh. It is passed in single quotes. It has no "!", which csh expands even there, and no %h, %n
# and %u, which pdsh replaces. It prints text of a job's owner as base64, or removes all but a few kinds of characters.
# It runs py-spy on at most 32 processes at the same time.
_SCRIPT = r"""
spy() { timeout -k 1 @EACH@ @PYSPY@ "$@"; };
spy --version >/dev/null 2>&1 </dev/null || exit 127;
var() { { tr "\000" "\n" </proc/$1/environ | sed -n "s/^$2=//p" | head -n 1 | tr -cd "[:alnum:]._:-" | cut -c 1-80; }
 2>/dev/null; };
of() { sed -n "s/^$2:[^0-9]*\([0-9]*\).*/\1/p" /proc/$1/status 2>/dev/null; };
is_python() { case $(readlink /proc/$1/exe 2>/dev/null) in *python*|*pypy*) return 0;; "") return $2;; esac;
 return 1; };
one() { p=$1; is_python $p 0 || return; r=$(var $p RANK);
 if [ -z "$r" ] && [ -r /proc/$p/environ ]; then return; fi;
 parent=$(of $p PPid); u=$(of $p Uid); [ -n "$u" ] || return;
 if [ -n "$r" ] && [ "$(var $parent RANK)" = "$r" ] && is_python $parent 1; then return; fi;
 run=$(var $p TORCHELASTIC_RUN_ID)@$(var $p MASTER_ADDR):$(var $p MASTER_PORT);
 [ -z "$want" ] || case $run in "$want"|"$want"@*) ;; *) return;; esac;
 echo "\"=$p $u ${r:--} $(var $p WORLD_SIZE) $run\",";
 ( i=0; while [ $i -lt @ROUNDS@ ]; do [ $i -eq 0 ] || sleep 1;
 o=$(spy dump --nonblocking --pid $p 2>&1) || o=$(spy dump --nonblocking --pid $p 2>&1);
 printf "%s\n" "$o" | head -c @BYTES@ | base64 | sed -u "s/.*/\"$p.$i &\",/"; i=$((i + 1)); done ) </dev/null &
 started=$((started + 1)); [ $((started % 32)) -ne 0 ] || wait; };
want=@WANTED@; echo "{"; echo "\"began\":$(date +%s),\"lines\":["; started=0;
{ timeout 10 find /proc -maxdepth 2 -path "/proc/[0-9]*/environ" -exec grep -lsF RANK= {} + 2>/dev/null | cut -d/ -f3;
 for l in $(timeout 10 pgrep -f "torchrun|torch[./]distributed[./](run|launch)"); do pgrep -P $l; done; } |
 sort -un | head -n @MOST@ | { while read q; do one $q; done; wait; };
echo "\"\"],"; echo "\"printed\":$(date +%s)"; echo "}"
"""
_PROCESS = re.compile(r"=([0-9]{1,10}) ([0-9]{1,10}) ([0-9]{1,7}|-|[^ ]*) ([^ ]*) ([^ ]*)")
_TEXT = re.compile(r"([0-9]{1,10})\.([0-9]{1,2}) ([A-Za-z0-9+/=]*)")


class Process(NamedTuple):
    """A process, and the output of py-spy about it in each round.

    `run` is `ID@HOST:PORT`: torchrun's run id and the rendezvous address, from the environment of the process.
    `uid` is from the kernel. `rank` is None if the environment cannot be read.
    """

    node: str
    pid: int
    uid: int
    rank: int | None
    world_size: int | None
    run: str
    rounds: tuple[str, ...]

    @property
    def job(self) -> tuple[int, str]:
        """The key of a job: user id and run. All processes of a user without a known run are one job."""
        return self.uid, self.run


class NodeOutput(NamedTuple):
    """The processes of one node, and the times when its command began and ended, by the node's clock."""

    began_unix_seconds: float
    printed_unix_seconds: float
    processes: tuple[Process, ...]


class _Form(msgspec.Struct):
    began: float
    lines: tuple[str, ...]
    printed: float


def command(py_spy: str, seconds: float, rounds: int, wanted: str = "") -> str:
    """Return the shell command that runs `py_spy` on the ranks of a node. `wanted` selects a run id; "": all runs.

    `seconds` is the deadline of the whole dump.
    """
    values = {
        "EACH": f"{max(2.0, seconds / (rounds + 2)):.0f}",
        "PYSPY": py_spy,
        "ROUNDS": str(rounds),
        "BYTES": str(MOST_TEXT_BYTES),
        "MOST": str(MOST_PROCESSES),
        "WANTED": shlex.quote(wanted),
    }
    script = " ".join(_SCRIPT.split("\n")).strip()
    for name, value in values.items():
        script = script.replace(f"@{name}@", value)
    return f"sh -c {shlex.quote(script)}"


def collect_replies() -> ReplyCollector[NodeOutput]:
    """Return a collector of the replies of all nodes to `command`."""
    return ReplyCollector(_found, {0}, tool="py-spy")


def _found(printed: bytes, node: str) -> NodeOutput:
    form = parse_answer(printed, _Form, "its answer cannot be read: {error}")
    fields_by_pid: dict[int, tuple[str, ...]] = {}
    pieces: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in form.lines:
        if match := _PROCESS.fullmatch(line):
            fields_by_pid[int(match[1])] = match.groups()
        elif match := _TEXT.fullmatch(line):
            pieces[int(match[1])][int(match[2])].append(match[3])
    if len(fields_by_pid) > MOST_PROCESSES:
        raise AnswerError(f"its answer has more than {MOST_PROCESSES} processes; it is ignored")
    processes = [
        Process(
            node=node,
            pid=pid,
            uid=int(uid),
            rank=_number(rank),
            world_size=_number(world_size),
            run=run,
            rounds=tuple(_text(texts) for _, texts in sorted(pieces[pid].items())),
        )
        for pid, (_, uid, rank, world_size, run) in fields_by_pid.items()
    ]
    return NodeOutput(form.began, form.printed, tuple(processes))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 8 and int(text) <= MOST_RANKS else None


def _text(pieces: list[str]) -> str:
    try:
        return base64.b64decode("".join(pieces), validate=True).decode("utf-8", "replace")
    except binascii.Error:
        return "Error: the output of py-spy is incomplete\n"
