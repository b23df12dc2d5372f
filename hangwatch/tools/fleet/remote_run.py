"""Execution of a command on many nodes in parallel, by ClusterShell. A reply may be incomplete, huge or late."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from ClusterShell.NodeSet import NodeSet
from ClusterShell.Task import task_self
from ClusterShell.Worker.Exec import ExecClient, ExecWorker

from hangwatch.formats import decoding
from hangwatch.tools.fleet.transports import OneForAll, OnePerNode, Transport

FANOUT = 256  # nodes at the same time; each needs a local process and three descriptors
MOST_ANSWER_BYTES = 32 << 20
MOST_COMPLAINT_BYTES = 4 << 10
MOST_LINE_BYTES = 1 << 20
_TICK_SECONDS = 0.25
_ENDING = re.compile(rb"=([0-9]{1,3})")


class Reply(NamedTuple):
    """The output of one node, and the times of the request and of the end of the reply, by the clock of this node.

    `status` is the exit code of the command; None if it did not end by the deadline, or if the transport does not
    report it. `is_late`: the deadline passed. `is_too_large`: the node sent more than `MOST_ANSWER_BYTES`.
    """

    node: str
    output: bytes
    status: int | None
    asked_unix_seconds: float
    ended_unix_seconds: float
    is_late: bool = False
    is_too_large: bool = False


class Progress(NamedTuple):
    """The number of nodes on which the command has ended, the number of all nodes, and the seconds since the start."""

    ended: int
    total: int
    seconds: float


def run_on_nodes(
    nodes: Sequence[str],
    transport: Transport,
    *,
    deadline_seconds: float,
    on_reply: Callable[[Reply], None],
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Mapping[str, bytes]:
    """Run the command of `transport` on all nodes. Return what each node printed on standard error.

    `on_reply` is called with the reply of each node as soon as it is complete. Every node has a reply, after the
    deadline at the latest. At most `FANOUT` commands run at the same time; the deadline of a node begins when its
    command starts. All started processes have ended when this function returns or raises. Raises OSError if the
    command of the transport cannot be started.
    """
    task = task_self()
    task.set_info("fanout", FANOUT)
    collecting = _Collecting(nodes, on_reply, on_progress)
    client = _NodeClient if isinstance(transport, OnePerNode) else _AllClient
    worker = _Worker(NodeSet.fromlist(list(nodes)), client, transport, collecting, deadline_seconds)
    task.schedule(worker)
    task.timer(_TICK_SECONDS, collecting, interval=_TICK_SECONDS, autoclose=True)
    try:
        task.run()
    finally:
        worker.abort()
        task.abort(kill=True)
    collecting.finish()
    return collecting.complaints


class _Collecting:
    """The output of the `waiting` nodes so far. ClusterShell calls `ev_timer`; its other events are not used."""

    def __init__(
        self, nodes: Sequence[str], on_reply: Callable[[Reply], None], on_progress: Callable[[Progress], None]
    ) -> None:
        self.waiting = dict.fromkeys(nodes, time.time())
        self._asked = len(nodes)
        self._began = time.monotonic()
        self.output = {node: bytearray() for node in nodes}
        self.complaints = dict.fromkeys(nodes, b"")
        self._too_large: set[str] = set()
        self._on_reply = on_reply
        self._on_progress = on_progress

    def started(self, node: str) -> None:
        self.waiting[node] = time.time()

    def take(self, node: str, text: bytes, *, is_complaint: bool) -> bool:
        """Add output of a node. Return False if no more output of this node is accepted."""
        if is_complaint and node in self.complaints:
            self.complaints[node] += text[: MOST_COMPLAINT_BYTES - len(self.complaints[node])]
            return True
        if node not in self.waiting or node in self._too_large:
            return False
        if len(self.output[node]) + len(text) > MOST_ANSWER_BYTES:
            self._too_large.add(node)
            self.output[node].clear()
            return False
        self.output[node] += text
        return True

    def is_whole(self, node: str) -> bool:
        """True if the output of a node is a complete JSON value."""
        try:
            decoding.decode_json(self.output[node], msgspec.Raw)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        return True

    def ended(self, node: str, status: int | None, *, is_late: bool = False) -> None:
        asked_unix_seconds = self.waiting.pop(node, None)
        if asked_unix_seconds is None:
            return
        self._on_reply(
            Reply(
                node=node,
                output=bytes(self.output.pop(node)),
                status=status,
                asked_unix_seconds=asked_unix_seconds,
                ended_unix_seconds=time.time(),
                is_late=is_late,
                is_too_large=node in self._too_large,
            )
        )
        self.ev_timer(None)

    def finish(self) -> None:
        """Add a reply for each node that has none: it is late or too large."""
        for node in list(self.waiting):
            self.ended(node, None, is_late=node not in self._too_large)

    def ev_timer(self, _: object) -> None:
        """Report progress. ClusterShell calls this method."""
        now = time.monotonic()
        self._on_progress(Progress(self._asked - len(self.waiting), self._asked, now - self._began))


class _NodeClient(ExecClient):  # type: ignore[misc]
    """A local process that runs the command on one node. Its output is kept in limited size, as bytes."""

    worker: _Worker

    def _build_cmd(self) -> tuple[list[str], None]:
        assert isinstance(self.worker.transport, OnePerNode)
        self.worker.collecting.started(self.key)
        return list(self.worker.transport.command(self.key)), None

    def _handle_read(self, sname: str) -> None:
        text = self._read(sname)
        is_complaint = sname == self.worker.SNAME_STDERR
        if not self.worker.collecting.take(self.key, text, is_complaint=is_complaint):
            self.abort()
            self.worker.collecting.ended(self.key, None)


class _AllClient(ExecClient):  # type: ignore[misc]
    """A local process that runs the command on all nodes. A label at the start of each line identifies the node."""

    worker: _Worker

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self._node_of: dict[str, str] = {}
        self._complaints: dict[str, bytes] = {}  # by label, until the node's name arrives on the other stream

    def _build_cmd(self) -> tuple[list[str], None]:
        assert isinstance(self.worker.transport, OneForAll)
        for node in self.key:
            self.worker.collecting.started(node)
        return list(self.worker.transport.command), None

    def _handle_read(self, sname: str) -> None:
        for line in self._readlines(sname):
            self._take(line, is_complaint=sname == self.worker.SNAME_STDERR)
        if len(self.streams[sname].rbuf) > MOST_LINE_BYTES:
            self.abort()

    def _take(self, line: bytes, *, is_complaint: bool) -> None:
        transport, collecting = self.worker.transport, self.worker.collecting
        assert isinstance(transport, OneForAll)
        status = transport.status(line)
        if status is not None:
            collecting.ended(*status)
            return
        labelled = transport.label(line)
        if labelled is None:
            return
        label, text = labelled
        if transport.names_itself and label not in self._node_of:
            if is_complaint:
                self._keep(label, text + b"\n")
            else:
                self._name(label, text.decode("utf-8", "replace").strip())
            return
        node = self._node_of.get(label, "") if transport.names_itself else label
        if transport.names_itself and not is_complaint and (ending := _ENDING.fullmatch(text)):
            collecting.ended(node, int(ending[1]))
        elif is_complaint:
            collecting.take(node, text + b"\n", is_complaint=True)
        elif text.startswith(b"{") or collecting.output.get(node):
            # Line ends are dropped: srun(1) splits lines of more than 1,024 bytes, and JSON needs no line ends.
            taken = collecting.take(node, text, is_complaint=False)
            if taken and text == b"}" and collecting.is_whole(node):
                collecting.ended(node, None)

    def _keep(self, label: str, text: bytes) -> None:
        if label in self._complaints or len(self._complaints) < len(self.key):
            self._complaints[label] = (self._complaints.get(label, b"") + text)[:MOST_COMPLAINT_BYTES]

    def _name(self, label: str, name: str) -> None:
        if name in self.worker.collecting.waiting and name not in self._node_of.values():
            self._node_of[label] = name
            self.worker.collecting.take(name, self._complaints.pop(label, b""), is_complaint=True)


class _Worker(ExecWorker):  # type: ignore[misc]
    """The local processes of one call of `run_on_nodes`."""

    def __init__(
        self,
        nodes: NodeSet,
        client: type[_NodeClient | _AllClient],
        transport: Transport,
        collecting: _Collecting,
        deadline_seconds: float,
    ) -> None:
        self.transport = transport
        self.collecting = collecting
        self._client = client
        super().__init__(nodes, None, timeout=deadline_seconds, command="", stderr=True)

    def _create_clients(self, **options: object) -> None:
        keys = [self.nodes] if self._client is _AllClient else list(self.nodes)
        stderr, timeout = options["stderr"], options["timeout"]
        self._clients += [self._client(key, "", self, stderr, timeout) for key in keys]

    def _on_node_close(self, node: str, rc: int) -> None:
        self.collecting.ended(node, rc)

    def _on_node_timeout(self, node: str | NodeSet) -> None:
        for one in [node] if isinstance(node, str) else node:
            self.collecting.ended(one, None, is_late=True)
