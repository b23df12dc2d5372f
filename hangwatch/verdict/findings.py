"""Pure: the classes `Rule` and `Finding`. A finding is the result of a rule: facts, without evidence and text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from hangwatch.model import Confidence, Group, Member, Signature
from hangwatch.verdict.measurements import OddGpu
from hangwatch.verdict.scene import Scene, count_ranks, waits_for
from hangwatch.verdict.sequence_rules import Answer

Text: TypeAlias = "Callable[[Finding], str]"


class Rule(NamedTuple):
    """A rule that names its `suspects` if enough other ranks wait for them.

    docs/verdicts.md prints the `description` of the suspects. At least half of the ranks in `half_of` must wait for one
    of the kinds in `waiting`, and these ranks must outnumber the suspects. `half_of` is "dumped" (the other ranks with
    a stack), "others" (the other ranks that responded) or "answered" (all ranks that responded). `outnumber`: "as many"
    allows equal numbers, "more" allows them only for one rank against one, "three times" needs three times as many.

    `by_stack`: the suspects are found by their stacks, so a rank in the same place does not wait for them. The search
    ends at the first such rule with suspects, except at a rule that `gives_way`. `weigh` may change the `confidence`.

    A rule to check ranks first names no rank; `settle` is the check that would decide. If it `may_name`, it names the
    ranks when the measurements agree. `says` and `settle` make its text, see `render`.
    """

    kind: str
    description: str
    suspects: Callable[[Scene], Sequence[Group]]
    says: Text
    waiting: tuple[str, ...] = ("ranks", "gpu")
    half_of: Literal["dumped", "others", "answered"] = "others"
    outnumber: Literal["as many", "more", "three times"] = "as many"
    confidence: Confidence = Confidence.HIGH
    weigh: Callable[[Finding], Confidence] | None = None
    by_stack: bool = False
    gives_way: bool = False
    settle: str | Text = ""
    may_name: bool = False


class Finding(NamedTuple):
    """A kind of verdict with its facts. The `suspects` are named if it has a confidence, else checked first.

    `others` are the other ranks with a stack. `rule` is set if a rule compared suspects and others. `answer` is the
    result of the sequence numbers; `by_numbers` is true if it decided. The groups of `scene` may be split by lines.
    `says` and `settle` make the text, and `caveat` is its last sentence. `apart` are other groups that differ.
    `contradicted` is the finding by stacks that sequence numbers disprove. `open_then` is the result of the operations
    that were open when the flight recorders were dumped.
    """

    kind: str
    scene: Scene
    says: Text
    suspects: tuple[Group, ...] = ()
    others: tuple[Group, ...] = ()
    confidence: Confidence = Confidence.NONE
    settle: str | Text = ""
    rule: Rule | None = None
    answer: Answer = Answer("unknown")
    by_numbers: bool = False
    apart: tuple[Group, ...] = ()
    contradicted: Finding | None = None
    odd_gpu: OddGpu | None = None
    caveat: str = ""
    open_then: Answer = Answer("unknown")

    @property
    def is_named(self) -> bool:
        """True if the suspects are named."""
        return self.confidence is not Confidence.NONE

    @property
    def members(self) -> list[Member]:
        """All suspected ranks."""
        return [member for group in self.suspects for member in group.members]

    @property
    def is_one_process(self) -> bool:
        """True if only one process was captured, and nothing shows that it is a rank of a job."""
        members = self.scene.grouping.members
        return len(members) == 1 and members[0].id.rank is None and self.scene.grouping.world_size is None

    @property
    def fewest_neighbours(self) -> int:
        """The lowest number of ranks with a stack on a node of a suspect."""
        return min(map(self.scene.neighbours, self.suspects))

    def waiting(self, *kinds: str) -> int:
        """Return the number of other ranks that wait for one of `kinds`. "work" counts ranks with a working GPU."""
        same_place = {group.key for group in self.suspects} if self.rule is not None and self.rule.by_stack else set()
        if "work" in kinds:
            return sum(member.signature is Signature.GPU_WORKS for group in self.others for member in group.members)
        return count_ranks(group for group in self.others if waits_for(group) in kinds and group.key not in same_place)
