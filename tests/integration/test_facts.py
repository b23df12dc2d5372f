"""The facts by which nodes are compared: these are the facts in `hangwatch check --json`."""

import json
from pathlib import Path

from hangwatch.checks.framework import node_facts
from tests.commands import HANGWATCH, finished
from tests.fake_driver import FakeDriver
from tests.node_tree import NodeTree


def test_versions_of_driver_and_firmware_and_the_gpus_by_model(fake_driver: FakeDriver) -> None:
    fake_driver.add("gpu 3 vbios 96.00.74.00.01")
    done = finished(*HANGWATCH, "check", "memory_pressure", "--json", env=fake_driver.environ)
    told = json.loads(done.stdout)["facts"]["node"]
    assert told["driver"] == "570.86.15"
    assert told["cuda_of_driver"] == "12.8"
    assert told["gpus"] == "8 NVIDIA H100 80GB HBM3"
    assert told["vbios"] == "96.00.74.00.01, 96.00.99.00.01"
    assert told["inforom"] == "G520.0200.00.05"


def test_adapters_and_limits_of_what_root_has_started(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    for device in ("mlx5_0", "mlx5_1"):
        told = {"fw_ver": "28.39.1002", "hca_type": "MT4129", "board_id": "MT_0000000838"}
        for name, text in told.items():
            tree.write(f"sys/class/infiniband/{device}/{name}", f"{text}\n")
    tree.write("proc/sys/fs/file-nr", "1000 0 9000000\n")
    tree.process(7, comm="slurmd", soft="1024", hard="524288")
    tree.process(9, comm="containerd", soft="1", hard="1", uid=4001)
    tree.process("self", soft="1024", hard="4096")
    told = node_facts.read_facts(tree.node()).node
    assert told["infiniband_firmware"] == "28.39.1002"
    assert told["infiniband_adapters"] == "2 MT4129 MT_0000000838"
    assert told["open_files_limit"] == "1024, hard 4096"
    assert told["locked_memory_limit_bytes"] == "8388608, hard 8388608"
    assert told["open_files_limit_of_slurmd"] == "1024, hard 524288"
    assert "open_files_limit_of_containerd" not in told
