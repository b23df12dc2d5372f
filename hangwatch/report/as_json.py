"""Groups and verdict -> the JSON that `explain --json` and `dump --json` print: a stable form, documented here.

    {"verdict": {"kind", "named": [RANK], "confidence", "message",
                 "evidence": [{"kind", "message", "supports": true|false|null, "ranks": [RANK]}]},
     "groups": [{"ranks": [int], "members": [RANK], "nodes": [str], "activity", "operation": str|null, "waits": bool,
                 "motion", "frames": [str], "gone": bool, "fault": {"subject", "reason", "detail", "remedy"}|null}],
     "absent": [[first, last]], "world_size": int|null, "notes": [str]}

RANK is {"node", "rank", "local_rank", "pid"}, each null where the input does not say. `named` is empty when nobody is
accused. `ranks` holds the global ranks that are known, `absent` the first and the last
of each range of ranks that should exist and gave no answer; frames are "function (file:line)", innermost first.
"""

from __future__ import annotations

import msgspec

from hangwatch.model import Group, Grouping, RankId, Verdict
from hangwatch.report.phrases import group_ids


def render(grouping: Grouping, verdict: Verdict) -> str:
    """The answer as one JSON object, ending in a line feed."""
    return msgspec.json.format(msgspec.json.encode(answer(grouping, verdict)), indent=1).decode() + "\n"


def answer(grouping: Grouping, verdict: Verdict) -> dict[str, object]:
    """The answer as plain lists and dicts, for those who add to it."""
    return {
        "verdict": {
            "kind": verdict.kind,
            "named": [_rank(rank) for rank in verdict.named],
            "confidence": verdict.confidence.value,
            "message": verdict.message,
            "evidence": [
                {
                    "kind": one.kind,
                    "message": one.message,
                    "supports": one.supports,
                    "ranks": [_rank(rank) for rank in one.ranks],
                }
                for one in verdict.evidence
            ],
        },
        "groups": [_group(group) for group in grouping.groups],
        "absent": [[ranks.start, ranks.stop - 1] for ranks in grouping.absent],
        "world_size": grouping.world_size,
        "notes": list(grouping.notes),
    }


def _group(group: Group) -> dict[str, object]:
    ids = group_ids(group)
    return {
        "ranks": [rank.rank for rank in ids if rank.rank is not None],
        "members": [_rank(rank) for rank in ids],
        "nodes": sorted({rank.node for rank in ids if rank.node}),
        "activity": group.activity,
        "operation": group.operation,
        "waits": group.waits,
        "motion": group.motion.value,
        "frames": [str(frame) for frame in group.frames],
        "gone": group.gone,
        "fault": msgspec.to_builtins(group.fault),
    }


def _rank(rank: RankId) -> dict[str, object]:
    return {"node": rank.node, "rank": rank.rank, "local_rank": rank.local_rank, "pid": rank.pid}
