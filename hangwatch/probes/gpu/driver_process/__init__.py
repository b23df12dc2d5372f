"""The process that owns the NVIDIA driver: `python -m hangwatch.probes.gpu.driver_process`.

No other package imports this one. `service` exchanges messages with the parent. `driver` reads all GPUs and
receives XIDs, `nvml_device` reads one GPU. `collect` reads details on request. `gpm` reads the counters of Hopper and
later.
"""
