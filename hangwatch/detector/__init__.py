"""Is a job making progress? A pure step function: (watch, what was seen, now) -> (watch, actions).

    starting -> training -> quiet -> suspected -> hung | stalled | waits_elsewhere | suspended | over
        -> recovered -> training
        -> ended
    starting, training, quiet, recovered -> unknown, without readings -> starting | training

`step` is fed once per power sample, `unsampled` where none has come, `captured` once per finished capture, `glanced`
once per glance, `end` when the ranks are gone. All times are CLOCK_MONOTONIC seconds, so a clock that steps changes
nothing. Power raises a suspicion; only stacks decide it.
"""

from hangwatch.detector.on_capture import captured, glanced, settled
from hangwatch.detector.on_power import step, unsampled
from hangwatch.detector.transitions import Action, TakeCapture, Transition, end

__all__ = ["Action", "TakeCapture", "Transition", "captured", "end", "glanced", "settled", "step", "unsampled"]
