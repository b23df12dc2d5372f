"""The process that owns the NVIDIA driver: `python -m hangwatch.probes.gpu.driver_process`.

Nothing imports this folder. `__main__` talks to the parent, `driver` sweeps over all GPUs, `nvml_device` is one GPU,
`collect` reads details on request, `gpm` reads Hopper's counters, `xid_events` listens for XIDs.
"""
