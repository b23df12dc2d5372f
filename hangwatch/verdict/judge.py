"""From groups of ranks to a verdict: find the ranks that block the job, then write the text. Pure."""

from msgspec.structs import replace

from hangwatch.model import Grouping, Supplement, Verdict
from hangwatch.verdict import kinds, recorder_dumps
from hangwatch.verdict.culprit_search import find
from hangwatch.verdict.recommendation import with_action
from hangwatch.verdict.scene import build_scene
from hangwatch.verdict.wording.evidence import gather
from hangwatch.verdict.wording.render import render


def judge(
    grouping: Grouping, ranks_here: int | None = None, dumped_records: recorder_dumps.Records | None = None
) -> Verdict:
    """Name the ranks that block a job, with the evidence, or explain why no rank can be named.

    `ranks_here` is the number of the job's ranks on the captured node; None if the whole job was captured.
    `dumped_records` are flight recorders that torch dumped by itself.
    """
    scene = build_scene(grouping, ranks_here)
    finding = find(scene)
    if dumped_records:
        finding = recorder_dumps.qualify(finding, dumped_records)
    return with_action(render(finding, gather(finding, scene)), grouping)


def complete(verdict: Verdict | None, supplement: Supplement) -> Verdict:
    """Return the verdict with the facts of a supplement, which name no rank. None: a verdict with only these facts."""
    if verdict is None:
        return Verdict.copy_from(supplement, kind="LogsOnly", message=supplement.headline)
    verdict = replace(verdict, evidence=(*verdict.evidence, *supplement.evidence))
    is_settled = bool(verdict.check_first) or kinds.find(verdict.kind).job != "stuck"
    if verdict.named or (supplement.only_if_stuck and is_settled):
        return verdict
    message = f"{verdict.message} {supplement.sentence}".rstrip()
    if supplement.check_first and not verdict.check_first:
        verdict = replace(verdict, check_first=supplement.check_first, next_step="")
    return replace(verdict, message=message)
