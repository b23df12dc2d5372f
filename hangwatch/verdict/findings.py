"""Pure: what a rule is, and what it finds in a scene. A finding states facts; `evidence` and `render` add the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from hangwatch.model import Confidence, Group, Member, Signature
from hangwatch.verdict.measurements import OddGpu
from hangwatch.verdict.scene import Scene, count_ranks, waits_for
from hangwatch.verdict.sequence_rules import Answer

Text: TypeAlias = "Callable[[Finding], str]"


class Rule(NamedTuple):
    """When ranks are named: these are suspect, so many of the others wait for these kinds, so sure.

    `who` and `waiting` say it for docs/verdicts.md. Those that wait for one of `waiting` must be at least half of the
    ranks in `half_of` ("dumped": that gave a stack and are no suspects; "others": that answered and are no suspects;
    "answered": all that answered), and outnumber the suspects: "as many" may be equal, "more" allows one against one,
    "three times" does not. `by_stack`: a stack makes them suspect, so a rank at the same place does not wait for them;
    of such rules the first with suspects decides, except for one that `gives_way`. `weigh` may change the `confidence`.

    A rule that is to be checked first names no rank: `settle` is what would tell more of its suspects. They are named
    only where it `may_name` and the machine says the same of them. `says` and `settle` make its text, see `render`.
    """

    kind: str
    who: str
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
    """A kind of verdict with its facts: the `suspects` are named if it has a confidence, else to be checked first.

    `others` are the other ranks with a stack. `rule` is set where a rule compared the two. `answer` is what sequence
    numbers tell of a job that stands still; they decided if `by_numbers`. `scene` may be apart by lines.
    `says` and `settle` make its text; what these state besides: `apart` stand apart, too, `contradicted` was
    what the stacks alone would have told. `caveat` is the last sentence of the text. `open_then` is what was open in
    dumps of flight recorders of one moment.
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
        """True if its suspects are named."""
        return self.confidence is not Confidence.NONE

    @property
    def members(self) -> list[Member]:
        """All suspected ranks."""
        return [member for group in self.suspects for member in group.members]

    @property
    def fewest_neighbours(self) -> int:
        """How many ranks gave a stack on each node of a suspect, at least."""
        return min(map(self.scene.neighbours, self.suspects))

    def waiting(self, *kinds: str) -> int:
        """How many of the others wait for one of `kinds`."""
        same_place = {group.key for group in self.suspects} if self.rule is not None and self.rule.by_stack else set()
        if "work" in kinds:
            return sum(member.signature is Signature.GPU_WORKS for group in self.others for member in group.members)
        return count_ranks(group for group in self.others if waits_for(group) in kinds and group.key not in same_place)
