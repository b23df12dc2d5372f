"""GPUs through NVIDIA's management library (NVML), in two processes.

In the daemon: `source` (the interface of GPU readings), `sampler` (its implementation by the driver), `query` (how
checks and captures read it), `details` (the values that checks ask for), `messages` (between the two processes). In the
other process: `driver_process`. Only it imports pynvml, because a driver call can block for ever or crash.
"""
