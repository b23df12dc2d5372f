"""Adds facts from logs, the kernel log or environments to a verdict. These facts name no rank. Pure."""

from msgspec.structs import replace

from hangwatch.model import Supplement, Verdict
from hangwatch.verdict import kinds


def complete(verdict: Verdict | None, supplement: Supplement) -> Verdict:
    """Return the verdict with the facts of a supplement; without a verdict, one with only these facts."""
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
