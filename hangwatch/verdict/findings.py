"""The classes `Rule` and `Finding`. A finding is the result of a rule: facts, without evidence and text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from hangwatch.collectives.wait_graph import WaitGraph
from hangwatch.model import Confidence, Group, Member, Signature
from hangwatch.verdict.measurements import OddGpu
from hangwatch.verdict.scene import Scene, count_ranks, waits_for
from hangwatch.verdict.sequence_rules import Answer

ANYTHING = ("ranks", "gpu", "lock", "thread", "nothing", "unknown")


class Rule(NamedTuple):
    """A rule that names its `suspects` if enough other ranks wait for them.

    `description` completes "Ranks that ..." in docs/verdicts.md. At least half of the ranks in `half_of` must wait for
    one of the kinds in `waiting`. `half_of` is "dumped" (the other ranks with a stack), "others" (the other ranks that
    responded) or "answered" (all ranks that responded). `outnumber` is the required number of waiting ranks: "as many"
    as suspects, "more" than suspects (or one against one), "twice" or "three times" as many.

    `by_stack` is true if the rule finds suspects by their stacks. A rank in the same place as a suspect does not wait
    for it. After such a rule with suspects no other rule is tried, unless `gives_way` is true. `weigh` returns a
    confidence, which replaces `confidence`.

    A rule in `check_first` names no rank unless `may_name` is true and the measurements agree. `sentence` is the row
    of its text in `wording/sentences.py`; "" for the row of its kind.
    """

    kind: str
    description: str
    suspects: Callable[[Scene], Sequence[Group]]
    waiting: tuple[str, ...] = ("ranks", "gpu")
    half_of: Literal["dumped", "others", "answered"] = "others"
    outnumber: Literal["as many", "more", "twice", "three times"] = "as many"
    confidence: Confidence = Confidence.HIGH
    weigh: Callable[[Finding], Confidence] | None = None
    by_stack: bool = False
    gives_way: bool = False
    sentence: str = ""
    may_name: bool = False


class Finding(NamedTuple):
    """A kind of verdict with its facts. With a confidence the `suspects` are named, else they are ranks to check first.

    `others` are the other ranks with a stack. `rule` is the rule that found the suspects, if any. `answer` is the
    result of the sequence numbers. `by_numbers` is true if the finding follows from it. `scene` may be split by lines.
    `sentence` is its row in `wording/sentences.py`, "" for that of its kind; `caveat` is the row of the text's end.
    `apart` are other groups that differ. `contradicted` is the finding by stacks that the numbers disprove, `open_then`
    the graph of the operations open when torch dumped them.
    """

    kind: str
    scene: Scene
    suspects: tuple[Group, ...] = ()
    others: tuple[Group, ...] = ()
    confidence: Confidence = Confidence.NONE
    sentence: str = ""
    rule: Rule | None = None
    answer: Answer = Answer("Unknown")
    by_numbers: bool = False
    apart: tuple[Group, ...] = ()
    contradicted: Finding | None = None
    odd_gpu: OddGpu | None = None
    caveat: Literal["", "one_moment", "healthy_job_too", "asynchronous", "no_stacks"] = ""
    open_then: WaitGraph = WaitGraph()

    @property
    def is_named(self) -> bool:
        """True if the verdict names the suspects."""
        return self.confidence is not Confidence.NONE

    @property
    def members(self) -> list[Member]:
        """All suspected ranks."""
        return [member for group in self.suspects for member in group.members]

    @property
    def fewest_neighbours(self) -> int:
        """The number of ranks with a stack on the node of a suspect; the lowest, if suspects are on several nodes."""
        return min(self.scene.stacks_by_node.get(member.id.node, 0) for member in self.members)

    def waiting(self, *kinds: str) -> int:
        """Return the number of other ranks in one of these waits; for "work", of other ranks with a working GPU."""
        same_place = {group.key for group in self.suspects} if self.rule is not None and self.rule.by_stack else set()
        if "work" in kinds:
            return sum(member.signature is Signature.GPU_WORKS for group in self.others for member in group.members)
        return count_ranks(group for group in self.others if waits_for(group) in kinds and group.key not in same_place)
