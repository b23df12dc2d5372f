"""GPUs through NVIDIA's management library (NVML), in two processes.

In the daemon: `source` (what gives GPU readings), `sampler` (the driver as such a source), `query` (asking it as the
checks do). `details` are the values that checks ask for, `messages` what the two processes say to each other. In the
process of its own: `child`, and nothing else imports pynvml, for a driver call can block for ever or crash.
"""
