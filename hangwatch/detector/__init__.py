"""Decide if a job makes progress. Every step is a pure function: (watch, observation, now) -> (watch, actions).

    starting -> training -> quiet -> suspected -> hung | stalled | waits_elsewhere | suspended | over
        -> recovered -> training
        -> ended
    starting, training, quiet, recovered -> unknown, without readings -> starting | training

There is one function for each observation: `apply_sample` (a power sample), `apply_missing_sample`, `apply_counters`
(progress counters), `apply_capture`, `apply_light_capture`, `apply_gap_capture`, and `end_watch` (the ranks have
ended). All times are CLOCK_MONOTONIC seconds, so setting the clock of the node has no effect. Low power, or a gap
between collectives, only begins a suspicion. The stacks confirm or end it.
"""

from hangwatch.detector.idle_workers import warn_of_idle_worker
from hangwatch.detector.on_capture import apply_capture, apply_light_capture, find_settled_ranks
from hangwatch.detector.on_power import apply_missing_sample, apply_sample
from hangwatch.detector.on_progress import apply_counters, apply_gap_capture
from hangwatch.detector.transitions import Action, TakeCapture, Transition, end_watch
