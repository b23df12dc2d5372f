"""Check that the function names of a program affect neither states nor pages nor the named rank.

The detector only receives three numbers of a capture: frozen, moving and unjudged ranks. If each capture finds the
same numbers under other names, the job has the same states and pages. Exception: the names of libraries'
collectives show that a node waits for others. Without these names a job pages sooner.
"""

from collections.abc import Sequence
from zlib import crc32

from msgspec.structs import replace

from hangwatch.config import Settings
from hangwatch.detector.job_watch import MotionCount
from hangwatch.model import Capture, Frame, ProcessDump, RankDump
from hangwatch.stacks import activity
from hangwatch.stacks.activity import Table
from hangwatch.state.steps import count_motion
from hangwatch.verdict.diagnosis import Diagnosis, diagnose
from hangwatch.verdict.remote_wait import waits_for_other_nodes

NAMES = (("qzx", "vbn", "wrt"), ("save_checkpoint", "log", "evaluate", "main"))
"""Random names and misleading names."""
CLEAR_MAJORITY = 3

_STANDARD_FILES = frozenset({"threading.py", "socket.py", "ssl.py", "selectors.py", "socketserver.py", "subprocess.py"})
_PROGRAM = ("hangwatch/tools/demo/", "tests/simulated/", "tests/scenarios/")
# replace torch.distributed and are known to hangwatch
_COLLECTIVES = "hangwatch/tools/demo/unix_collectives.py", "tests/simulated/barriers.py"


def assert_names_do_not_matter(look: Diagnosis, settings: Settings) -> None:
    """Assert that an empty activity table finds the same numbers of frozen, moving and unjudged ranks.

    Other function names in the program must change neither these numbers nor the named ranks. Exception: fewer than
    three ranks wait, so there is no clear majority. A function name may then decide if a rank is named (see
    `_make_outside_rule` in verdict/rules.py), but never for a different rank.
    """
    is_small = sum(group.size for group in look.grouping.groups if group.waits) < CLEAR_MAJORITY
    seen = counted(look)
    assert counted(diagnose(look.capture, settings.capture, Table(()), unix_now=0.0)) == seen
    table = activity.load(settings.activities.rules)
    for names in NAMES:
        capture = with_names(look.capture, names)
        assert capture != look.capture, "nothing is renamed: it proves nothing"
        renamed = diagnose(capture, settings.capture, table, unix_now=0.0)
        assert counted(renamed) == seen, names
        assert _waits(renamed) == _waits(look), names
        named, said = renamed.verdict.named, (names, look.verdict.message, renamed.verdict.message)
        assert named == look.verdict.named or (is_small and () in {named, look.verdict.named}), said


def counted(look: Diagnosis) -> MotionCount:
    """Return the motion counts of a capture, without texts and hashes of places: these contain names."""
    return replace(count_motion(look.grouping), movers_text="", stays={})


def _waits(look: Diagnosis) -> bool:
    return waits_for_other_nodes(look.grouping, look.verdict, has_ranks_on_other_nodes=True)


def with_names(capture: Capture, names: Sequence[str]) -> Capture:
    """Return the capture with other names of the program's own functions, in ranks and workers."""

    def frame(original: Frame) -> Frame:
        return (
            replace(original, function=names[crc32(original.function.encode()) % len(names)])
            if _is_own(original)
            else original
        )

    def dump(original: ProcessDump) -> ProcessDump:
        threads = (replace(thread, frames=tuple(map(frame, thread.frames))) for thread in original.threads)
        return replace(original, threads=tuple(threads))

    def rank(original: RankDump) -> RankDump:
        workers = (replace(worker, rounds=tuple(map(dump, worker.rounds))) for worker in original.workers)
        return replace(original, rounds=tuple(map(dump, original.rounds)), workers=tuple(workers))

    return replace(capture, ranks=tuple(map(rank, capture.ranks)))


def _is_own(frame: Frame) -> bool:
    """True for a file of the simulated program: in a script, one outside of all packages."""
    if frame.function == "<module>" or frame.file.endswith(_COLLECTIVES):
        return False
    if any(folder in frame.file for folder in _PROGRAM):
        return True
    return "/" not in frame.file and frame.file not in _STANDARD_FILES
