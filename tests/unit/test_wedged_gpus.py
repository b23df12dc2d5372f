"""The times of the next try for GPUs that made the driver block."""

from hangwatch.probes.gpu.blocked_gpus import LONGEST_PAUSE_SECONDS, BlockedGpus


def left_out(first_pause_seconds: float = 10.0) -> BlockedGpus:
    gpus = BlockedGpus(first_pause_seconds)
    gpus.block(3, "sample", 5.0, now=100.0)
    return gpus


def test_pauses_double_with_each_failed_try_up_to_the_longest() -> None:
    gpus, now, pauses = left_out(), 100.0, []
    for _ in range(8):
        began = now
        while not gpus.due_for_retry(now, ()):
            now += 1.0
        pauses.append(now - began)
        gpus.retry_failed(3, now)
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]


def test_gpu_with_a_hanging_process_is_not_due() -> None:
    gpus = left_out()
    assert (gpus.due_for_retry(110.0, {3}), gpus.due_for_retry(110.0, {None, 4})) == ((), (3,))


def test_gpu_that_answers_is_read_again_and_its_pause_is_remembered() -> None:
    gpus = left_out()
    gpus.retry_failed(3, 110.0)
    gpus.retry_succeeded(3, 130.0)
    assert (gpus.faults, gpus.due_for_retry(1e6, ())) == ({}, ())
    gpus.block(3, "sample", 5.0, now=200.0)
    assert (gpus.due_for_retry(239.0, ()), gpus.due_for_retry(240.0, ())) == ((), (3,))
    gpus.retry_succeeded(3, 240.0)
    gpus.block(3, "sample", 5.0, now=240.0 + LONGEST_PAUSE_SECONDS)
    assert gpus.due_for_retry(250.0 + LONGEST_PAUSE_SECONDS, ()) == (3,)
