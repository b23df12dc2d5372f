"""Collector of the logs of ranks, launchers and the kernel that are in the sources beside stack dumps. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice

from msgspec import structs

from hangwatch import words
from hangwatch.logs import enqueued_work, failures, merged_logs, rank_log
from hangwatch.logs.kernel_text import MOST_KEPT, KernelLogLine
from hangwatch.logs.merged_logs import RankLog
from hangwatch.logs.rank_reports import RankWork
from hangwatch.model import RankId
from hangwatch.tools.explain import file_names, line_stream, roles
from hangwatch.tools.explain.file_names import Place
from hangwatch.tools.explain.streams import Source

_MOST_UNRANKED = 4096
_MOST_EMPTY_NAMED = 16  # files without a dump or log, each listed by its name


class LogCollector:
    """The logs that were found in the sources so far. `old` is the number of files of earlier torchrun attempts."""

    def __init__(self, notes: list[str]) -> None:
        self.old = 0
        self.kernel: dict[tuple[str, str, str], KernelLogLine] = {}
        self._notes = notes
        self._parts: list[tuple[str, RankId, rank_log.Log]] = []
        self._told: list[tuple[str, failures.Failure]] = []
        self._unknown: dict[Place, tuple[RankId, rank_log.Log]] = {}
        self._ranks_in: dict[Place, set[int]] = defaultdict(set)
        self._strange: dict[str, list[str]] = {}
        self._silent: dict[str, list[str]] = {}
        self._is_kernel_cut = False
        self.processes: set[RankId] = set()
        self.works: list[RankWork] = []
        self.unranked: list[RankLog] = []

    def add_note(self, note: str) -> None:
        """Add a note unless it has been added before."""
        if note not in self._notes:
            self._notes.append(note)

    def error_file(self, name: str, rank: RankId, text: str) -> None:
        """Read the error.json that torchelastic wrote for a rank. It takes precedence over the log of the rank."""
        log = rank_log.Log()
        try:
            log.failures.append(failures.parse_error_file(text))
        except ValueError as error:
            self._notes.append(f"{name}:1: {error}")
            return
        if rank.is_numbered:
            self._parts.insert(0, (name, rank, log))
        else:
            self._unknown[name, None] = rank, log
            self._strange[name] = [f"{name}: holds an error of an unknown rank: name the file error-rankN.json"]

    def add(self, name: str, streams: Sequence[Source]) -> None:
        """Keep the logs of a source. A note reports lines that belong to no rank and no dump."""
        strange, example, of_ranks_here = 0, "", False
        self._forget_earlier_attempts(name, [source.reader.log for source in streams])
        has_nodes = len({source.id.node for source in streams} - {None}) > 1
        are_pods = len(streams) > 1 and not any(map(merged_logs.is_of_process, (source.id for source in streams)))
        for source in streams:
            reader, rank = source.reader, source.id
            place = name, rank.node if has_nodes else None
            is_of_rank = merged_logs.is_of_process(rank) or (are_pods and rank.node is not None)
            is_kernels = reader.log.is_kernels and not reader.processes and not is_of_rank
            writer = "" if is_kernels else words.name_ranks([rank]) if is_of_rank else words.printable(name)
            self.processes |= reader.log.processes | ({rank} if rank.rank is not None and rank.pid else set())
            self.works += enqueued_work.read_works(name, rank, reader.log)
            if reader.log.kernel:
                heard = {(*key, writer): line._replace(writer=writer) for key, line in reader.log.kernel.items()}
                heard = {**self.kernel, **heard, **self.kernel}
                self._is_kernel_cut |= reader.log.is_kernel_cut or len(heard) > MOST_KEPT
                self.kernel = dict(islice(heard.items(), MOST_KEPT))
            if is_kernels and reader.log.kernel:
                of_ranks_here = True
                continue
            of_ranks = [
                (name, failure._replace(rank=_complete_rank(failure.rank, rank)))
                for failure in reader.log.failures
                if failure.rank is not None
            ]
            self._told += of_ranks
            of_ranks_here = of_ranks_here or bool(of_ranks)
            is_log = reader.log.lines > 0 and not reader.has_dump and (reader.is_log or reader.strange > 0)
            self._ranks_in[place] |= {rank.rank} if is_log and rank.rank is not None else set()
            if is_log and is_of_rank:
                self._parts.append((name, rank, reader.log))
                of_ranks_here = True
            elif reader.strange:
                strange += reader.strange
                example = example or reader.strange_example
                if is_log and not reader.processes:
                    self._unknown[place] = rank, reader.log
                else:
                    self._keep_unranked(name, rank, reader.log)
        kind = "of no known rank" if of_ranks_here else "not part of a stack dump"
        lines = f"{words.count(strange, 'line')} {'is' if strange == 1 else 'are'}"
        notes = [f"{name}: {lines} {kind}, for example {example!r}"] if strange else []
        notes = [f"{name}: {hint}" for hint in _explain_strange_lines([source.reader for source in streams])] or notes
        if streams and not of_ranks_here and not any(source.reader.processes for source in streams):
            notes.append(f"{name}: holds no known stack dump and no log of a known rank")
            self._silent[name] = notes
        elif any(name == place[0] for place in self._unknown):
            self._strange.setdefault(name, notes)
        else:
            self._notes += notes

    def _forget_earlier_attempts(self, name: str, logs: Sequence[rank_log.Log]) -> None:
        """Forget the failures before the last restart by torchrun or Slurm, if the log shows what failed after it.

        A line reports the restart. Without it, the summary lists only the processes of the last attempt.
        """
        listed = {rank.pid for log in logs for rank in log.processes}
        ended = sorted(chain.from_iterable(log.ended for log in logs))
        restart = max(
            (number for number, pid in ended if pid not in listed and (not pid or ended[-1][1] in listed)), default=0
        )
        failed = (failure.number for log in logs for failure in log.failures if not failure.of_others)
        if 0 < restart < max((*failed, *(work.number for log in logs for work in log.works.values())), default=0):
            self._notes.append(f"{name}: lines 1 to {restart} are of earlier attempts: their failures are ignored")
            for log in logs:
                log.forget(restart)

    def number_ended(self, dumped: Collection[RankId], world_size: int) -> None:
        """Number the process that ended by the line of a launcher, if only one rank of the job has no stack."""
        missing = set(range(world_size)) - {rank.rank for rank in dumped}
        ended = [(name, failure) for name, failure in self._told if failure.rank and failure.rank.rank is None]
        if (
            len(missing) == len(ended) == 1
            and (rank := ended[0][1].rank)
            and all(rank.pid != other.pid for other in dumped)
        ):
            self._told.remove(ended[0])
            self._told.append((ended[0][0], ended[0][1]._replace(rank=structs.replace(rank, rank=missing.pop()))))

    def _keep_unranked(self, name: str, rank: RankId, log: rank_log.Log) -> None:
        if (log.messages or log.failures) and len(self.unranked) < _MOST_UNRANKED:
            self.unranked += merged_logs.join([(name, rank, log)])

    def _name_processes(self, dumped: Collection[RankId]) -> None:
        """Assign the log and the end of each process to its rank. Logs of other processes become `unranked`."""
        numbered = {*self.processes, *enqueued_work.find_processes(self.works)}
        ended = [failure.rank for _, failure in self._told if failure.rank and not failure.rank.is_numbered]
        ranks = roles.find_log_owners(ended, dumped, numbered)
        self._told = [
            (name, failure._replace(rank=failure.rank and (ranks.get(failure.rank) or failure.rank)))
            for name, failure in self._told
        ]
        owners = roles.find_log_owners([rank for _, rank, _ in self._parts], dumped, numbered)
        parts, self._parts = self._parts, []
        for name, writer, log in parts:
            if (rank := owners[writer]) is not None:
                self._parts.append((name, rank, log))
            else:
                self._keep_unranked(name, writer, log)

    def logs(self, dumped: Collection[RankId]) -> tuple[RankLog, ...]:
        """Return one log for each rank. `dumped` are the ranks with a stack dump."""
        self._name_processes(dumped)
        numbers = file_names.number_places(self._ranks_in, self._unknown)
        families = {file_names.find_family(place) for place, ranks in self._ranks_in.items() if ranks}
        for place, (rank, log) in self._unknown.items():
            name = place[0]
            is_known = place in numbers or (file_names.find_family(place) in families and not self._ranks_in.get(place))
            if is_known:
                node = rank.node or (None if place in numbers else file_names.without_ending(name))
                self._parts.append((name, structs.replace(rank, rank=numbers.get(place), node=node), log))
            else:
                self._notes += self._strange.pop(name, ())
                self._keep_unranked(name, rank, log)
            if is_known or log.messages or log.failures:
                self._silent.pop(name, None)
        if len(self._silent) > _MOST_EMPTY_NAMED:
            note = f"{len(self._silent)} files hold no known stack dump and no log of a known rank"
            self._notes.append(f"{note}, for example {next(iter(self._silent))}")
        else:
            self._notes += chain.from_iterable(self._silent.values())
        if self._is_kernel_cut:
            self._notes.append(f"more than {MOST_KEPT} different kernel log lines: only the first {MOST_KEPT} are used")
        if self.old:
            self._notes.append(f"{words.count(self.old, 'file')} of earlier attempts ignored")
        return merged_logs.join(self._parts, self._told)


def _complete_rank(ended: RankId, writer: RankId) -> RankId:
    """Return the process that a line reports as ended. A rank reports its own end, or that of a child, by the pid."""
    if writer.is_numbered and ended == RankId(pid=ended.pid):
        return writer
    return structs.replace(ended, node=ended.node or writer.node)


def _explain_strange_lines(readers: Sequence[line_stream.Reader]) -> Iterator[str]:
    """Yield what the lines outside of dumps are, if they are an answer of hangwatch or frames without their thread."""
    has_dump, lone_frames = any(reader.processes for reader in readers), sum(reader.lone_frames for reader in readers)
    if any(reader.has_answer for reader in readers):
        if has_dump:
            yield "only its stacks are read: `hangwatch dump --json` and incident.json also hold sequence numbers"
        else:
            yield "is an answer of hangwatch without its stacks: `hangwatch dump --stacks`, --json or -o DIR keeps them"
    elif lone_frames and not has_dump:
        frames = words.count(lone_frames, "frame")
        yield f'{frames} without the line above, `Thread ... "MainThread"`: paste that line, too'
