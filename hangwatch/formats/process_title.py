"""Titles that programs set for their processes in place of the command line, see setproctitle(3). Pure.

vLLM: `VLLM::Worker_DP0_TP2` (vllm/utils/system_utils.py); SGLang: `sglang::scheduler_PP1_TP0`
(sglang/srt/managers/scheduler.py); Ray: `ray::Actor.method` while an actor runs a method.
"""

import re
from typing import NamedTuple

_INTERPRETER = re.compile(r"(?:^|/)(?:python|pypy)[\w.-]*$")
_NUMBERS = re.compile(r"_([A-Z]{2,5})(\d{1,7})(?=_|$)")
_RANKS = ("DP", "PP", "TP")  # EP, DCP and others divide the same processes once more
_PLAIN = re.compile(r"[A-Za-z][\w:.-]{0,63}")
_TELLS = re.compile(r"::|[^\d.]\d{1,7}$")
_DIGITS = re.compile(r"\d+")


class Title(NamedTuple):
    """A title: its first word, and the numbers in it by their kind (TP, PP, DP, ...)."""

    text: str
    numbers: dict[str, int]

    @property
    def is_scoped(self) -> bool:
        """True if it names a class or engine, as in `ray::Actor`. Programs of Python set such titles."""
        return "::" in self.text

    @property
    def family(self) -> str:
        """The title without numbers and without an actor's method. Processes of one kind have the same family."""
        actor = self.text.partition(".")[0] if self.is_scoped else self.text
        return _DIGITS.sub("#", _NUMBERS.sub("", actor))

    @property
    def name(self) -> str | None:
        """The title, if it names its process; None if it has unusual characters or is only the name of a program."""
        return self.text if _PLAIN.fullmatch(self.text) and _TELLS.search(self.text) else None

    @property
    def rank(self) -> int | None:
        """The tensor, pipeline or data parallel number in the title; None if it has no such number or several."""
        ranks = [self.numbers[kind] for kind in _RANKS if kind in self.numbers]
        return ranks[0] if len(ranks) == 1 else None

    @property
    def is_worker(self) -> bool:
        """True if the title has a tensor or pipeline parallel number, so that the process holds a part of the model.

        A process with only a data parallel number may be a server.
        """
        return not self.numbers.keys().isdisjoint(("TP", "PP"))


def read(command: str) -> Title | None:
    """Return the title in a command line; None if it begins with a Python interpreter or a word without letters."""
    first = next(iter(command[:4096].split(None, 1)), "")
    if not re.search("[A-Za-z]", first) or _INTERPRETER.search(first):
        return None
    text = first.rpartition("/")[2]
    return Title(text, {kind: int(number) for kind, number in _NUMBERS.findall(text)})
