"""The process that owns the NVIDIA driver: `python -m hangwatch.probes.gpu.driver_process`. Nobody imports this folder.

`__main__` speaks with the parent, `driver` sweeps over all GPUs, `gpu` is one of them, `collect` reads what is too slow
to sample, `xids` listens for the driver's events.
"""
