"""Decides if a job makes progress, by pure steps: (watch, observation, now) -> (watch, actions).

    starting -> training -> quiet -> suspected -> hung | stalled | waits_elsewhere | suspended | over
        -> recovered -> training
        -> ended
    starting, training, quiet, recovered -> unknown, without readings -> starting | training

`step` takes a power sample, `unsampled` the lack of one, `captured` a finished capture, `glanced` a finished light
capture, `end` the end of the ranks. All times are CLOCK_MONOTONIC seconds, so a clock that steps changes nothing. Power
raises a suspicion; only stacks decide it.
"""

from hangwatch.detector.on_capture import apply_capture, apply_light_capture, find_settled_ranks
from hangwatch.detector.on_power import apply_missing_sample, apply_sample
from hangwatch.detector.transitions import Action, TakeCapture, Transition, end_watch

__all__ = [
    "Action",
    "TakeCapture",
    "Transition",
    "apply_capture",
    "apply_light_capture",
    "apply_missing_sample",
    "apply_sample",
    "end_watch",
    "find_settled_ranks",
]
