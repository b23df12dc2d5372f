"""GPUs, read through NVIDIA's management library (NVML) in two processes.

* In the daemon: `source` is the interface of GPU readings, and `sampler` its implementation for NVIDIA's driver.
  Checks and captures read it through `query`. `details` defines the values that are read on request. `messages`
  connect the two processes.
* In the other process: `driver_process`. No other module imports pynvml, because a driver call can block for ever or
  crash.
"""
