"""GPUs, read through NVIDIA's management library (NVML) in two processes.

* In the daemon: `source` is the interface of GPU readings, and `sampler` its implementation for the driver. `query` is
  how checks and captures read it. `details` are the values on request. `messages` connect the two processes.
* In the other process: `driver_process`. No other module imports pynvml, because a driver call can block for ever or
  crash.
"""
