"""What every value is, and the fault that stands in place of one."""

from __future__ import annotations

from typing import Literal

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values: immutable, compared by content, built by keyword."""


class Fault(Value, frozen=True):
    """Something that should have answered and did not.

    `subject` is what was asked ("gpu 3", "pid 4711"), `reason` a CamelCase word for machines ("GpuIsLost"), `detail`
    the foreign error in its own words, `remedy` what to type or do, empty when there is nothing to do. `about` is
    "target" where the fault says something of what was asked, "tool" where it may be ours alone: said by the door that
    makes the fault, which knows; without a word it is ours, and nobody is accused by it.
    """

    subject: str
    reason: str
    detail: str
    remedy: str = ""
    about: Literal["target", "tool"] = "tool"
