"""Base class of all values, and `Fault`, returned instead of a value that could not be read."""

from __future__ import annotations

from typing import Literal

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values: immutable, compared by content, built by keyword."""


class Fault(Value, frozen=True):
    """Something that should have answered and did not.

    `subject` is what was asked ("gpu 3", "pid 4711"), `reason` a CamelCase word for machines ("GpuIsLost"), `detail`
    the original error text, `remedy` what to type or do, empty when there is nothing to do. `about` is "target" if the
    fault is evidence about `subject`, and "tool" if the cause may be hangwatch itself. The adapter that makes the fault
    decides; the default is "tool", which is no evidence against a rank.
    """

    subject: str
    reason: str
    detail: str
    remedy: str = ""
    about: Literal["target", "tool"] = "tool"
