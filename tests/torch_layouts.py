"""Print the field offsets of PyTorch's flight recorder, version by version, from the headers in its wheels.

usage: python -m tests.torch_layouts [VERSION | WHEEL | FOLDER]... > hangwatch/probes/torch_recorder/layouts.toml
       python -m tests.torch_layouts --known WHEEL | FOLDER: is its layout in that table, and where are recorders?

For a VERSION, pip downloads the wheel for macOS on arm64, which has the same headers and a tenth of the size. The
wheel is deleted afterwards. A FOLDER holds `include` and `version.py`, like an installed torch. The script cuts the
definition of the recorder out of its header and makes its members public. g++ then writes the offsets into a
section of an object file. Nothing is linked or run. The offsets are those of the machine on which g++ runs; the
table is for x86-64. On aarch64 a mutex of glibc has 48 bytes instead of 40, so later fields of the recorder would
differ.
"""

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from elftools.elf.elffile import ELFFile

from hangwatch.probes.torch_recorder import layouts, symbols_child

PLATFORMS = ("macosx_14_0_arm64", "macosx_11_0_arm64")
HEADER = "torch/csrc/distributed/c10d/FlightRecorder.hpp"
OLD_HEADER = "torch/csrc/distributed/c10d/NCCLUtils.hpp"  # 2.5: NCCLTraceBuffer
SCALAR_TYPES = ("torch/headeronly/core/ScalarType.h", "c10/core/ScalarType.h")  # the first path since torch 2.9
SECTION = "field_offsets"
NOT_IN_THE_WHEEL = ("nccl.h", "ATen/cuda/CUDAEvent.h")  # the included headers include these
FIELDS = {
    "enabled": "offsetof(Recorder, enabled_)",
    "entries": "offsetof(Recorder, entries_)",
    "capacity": "offsetof(Recorder, max_entries_)",
    "next": "offsetof(Recorder, next_)",
    "next_id": "offsetof(Recorder, id_)",
    "reset_epoch": "NOWHERE",
    "statuses": "offsetof(Recorder, all_pg_status_)",
    "members": "offsetof(Recorder, pg_name_to_ranks_)",
    "library_version": "NOWHERE",
    "record_bytes": "sizeof(Record)",
    "record_id": "offsetof(Record, id_)",
    "record_epoch": "NOWHERE",
    "group_id": "offsetof(Record, pg_id_)",
    "group_names": "offsetof(Record, pg_name_)",
    "collective_seq": "offsetof(Record, collective_seq_id_)",
    "p2p_seq": "offsetof(Record, p2p_seq_id_)",
    "op_id": "offsetof(Record, op_id_)",
    "operation": "offsetof(Record, profiling_name_)",
    "created": "offsetof(Record, time_created_)",
    "timeout": "offsetof(Record, timeout_ms_)",
    "is_p2p": "offsetof(Record, isP2P_)",
    "started": "offsetof(Record, time_discovered_started_)",
    "completed": "offsetof(Record, time_discovered_completed_)",
    "input_dims": "offsetof(Record, input_dims_)",
    "input_dtypes": "offsetof(Record, input_dtypes_)",
    "output_dims": "offsetof(Record, output_dims_)",
    "output_dtypes": "offsetof(Record, output_dtypes_)",
    "sizes": "offsetof(Record, sizes_)",
    "dim_bytes": "sizeof(*((Record*)0)->input_dims_.data())",
    "thread_id": "NOWHERE",
    "thread_name": "NOWHERE",
    "retired": "offsetof(Record, retired_)",
    "enqueued": "offsetof(c10d::ProcessGroupStatus, lastEnqueuedSeq)",
    "status_started": "offsetof(c10d::ProcessGroupStatus, lastStartedSeq)",
    "status_completed": "offsetof(c10d::ProcessGroupStatus, lastCompletedSeq)",
}
# Members that some versions do not have. The regular expression finds their declaration in the header.
OPTIONAL = {
    "reset_epoch": (r"size_t reset_epoch_ = 0;", "offsetof(Recorder, reset_epoch_)"),
    "record_epoch": ("size_t reset_epoch_;", "offsetof(Record, reset_epoch_)"),
    "library_version": (r"std::string (comm_lib_version_|nccl_version_);", r"offsetof(Recorder, \1)"),
    "thread_id": ("std::thread::id thread_id_;", "offsetof(Record, thread_id_)"),
    "thread_name": ("std::string thread_name_;", "offsetof(Record, thread_name_)"),
}
PROGRAM = """
#include <bits/stdc++.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>
{includes}
namespace at::cuda {{ struct CUDAEvent; }}
namespace c10d::wanted {{
#define private public
{definition}
}}
using Recorder = c10d::wanted::{recorder};
using Record = Recorder::Entry;
constexpr unsigned long long NOWHERE = ~0ull;
extern const unsigned long long offsets[] __attribute__((used, section("{section}"))) = {{ {constants} }};
"""


class CannotTellError(Exception):
    """The layout or the headers of a torch version were not found. The message is the reason."""


def layout(include: Path) -> dict[str, int]:
    """Return the offsets in bytes by field, -1 if this version lacks the field. Raises CannotTellError."""
    header = next((name for name in (HEADER, OLD_HEADER) if (include / name).exists()), None)
    if header is None:
        raise CannotTellError("no header of a flight recorder")
    text = (include / header).read_text()
    match = re.search(
        r"^(?:template <typename EventType>\n)?struct (FlightRecorder|NCCLTraceBuffer) \{.*?^\};", text, re.M | re.S
    )
    if match is None:
        raise CannotTellError(f"{header} declares no flight recorder")
    wanted = dict(FIELDS)
    for name, (member, constant) in OPTIONAL.items():
        found = re.search(member, match[0])
        if found is not None:
            wanted[name] = found.expand(constant)
    includes = [name for name in re.findall(r"#include <(.+)>", text) if name not in NOT_IN_THE_WHEEL]
    program = PROGRAM.format(
        includes="\n".join(f"#include <{name}>" for name in includes),
        definition=match[0],
        recorder=match[1] + ("<c10::Event>" if match[0].startswith("template") else ""),
        section=SECTION,
        constants=", ".join(wanted.values()),
    )
    return dict(zip(FIELDS, _compiled(program, include), strict=True))


def _compiled(program: str, include: Path) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "layout.cpp"), Path(folder, "layout.o")
        source.write_text(program)
        command = ["g++", "-std=c++20", "-w", "-c", "-O0", "-I", str(include)]
        command += ["-I", str(include / "torch/csrc/api/include")]
        done = subprocess.run([*command, str(source), "-o", str(built)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotTellError(done.stderr[:2000])
        with built.open("rb") as file:
            raw = ELFFile(file).get_section_by_name(SECTION).data()
    return list(struct.unpack(f"<{len(raw) // 8}q", raw))


def dtypes(include: Path) -> list[str]:
    """Return the names of the values of c10::ScalarType, in the order of their numbers."""
    text = "".join((include / name).read_text() for name in SCALAR_TYPES if (include / name).exists())
    table = re.search(r"#define AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS\(_\)(.*?)\n\n", text, re.DOTALL)
    return re.findall(r"_\([^\n]*?, (\w+)\)", table[1])


def toml(offsets_by_version: dict[str, dict[str, int]], names: Sequence[str]) -> str:
    """Return the text of the table, oldest version first. Versions with the same layout share a row."""
    rows: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for version in sorted(offsets_by_version, key=lambda version: [int(part) for part in version.split(".")[:3]]):
        rows.setdefault(tuple(offsets_by_version[version].items()), []).append(version)
    parts = [
        "# Printed by `python -m tests.torch_layouts`; of x86-64, where -1 is a field that the versions do not have.",
        "",
    ]
    parts.append("dtypes = [" + ", ".join(f'"{name}"' for name in names) + "]")
    for row, versions in rows.items():
        parts += ["", "[[layouts]]", "versions = [" + ", ".join(f'"{version}"' for version in versions) + "]"]
        parts += [f"{field} = {offset}" for field, offset in row]
    return "\n".join(parts) + "\n"


@contextmanager
def headers(source: str) -> Iterator[tuple[str, Path]]:
    """Yield version and header folder of each torch in a wheel or folder, or of a version. Raises CannotTellError."""
    with tempfile.TemporaryDirectory() as folder:
        if not Path(source).exists():
            source = _downloaded(source, Path(folder))
        if source.endswith(".whl"):
            with zipfile.ZipFile(source) as wheel:
                parts = re.compile("/include/|^torch/version.py$|^torch/lib/libtorch_(?:cpu|cuda)[.]so$")
                wanted = [name for name in wheel.namelist() if parts.search(name)]
                wheel.extractall(folder, wanted)
            Path(source).unlink() if folder in source else None
            source = f"{folder}/torch"
        text = Path(source, "version.py").read_text()
        version = re.search(r"^__version__ = '(\d+\.\d+\.\d+)", text, re.MULTILINE)
        if version is None:
            raise CannotTellError(f"{source} does not say its version")
        yield version[1], Path(source) / "include"


def _downloaded(version: str, folder: Path) -> str:
    for platform in PLATFORMS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.11", "--platform", platform, "--dest", str(folder), f"torch=={version}"]
        if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return str(next(folder.glob("*.whl")))
    raise CannotTellError(f"the index has no wheel of torch {version}")


def describe_known(measured: Mapping[str, int], folder: Path) -> str:
    """Return the known versions with this layout, and the symbols of recorders in each library below `folder`.

    Raises CannotTellError if the layout is new, or no library has a symbol. gloo has a recorder since torch 2.8.
    """
    known = [each for each in layouts.candidates("") if all(getattr(each, name) == at for name, at in measured.items())]
    if not known:
        raise CannotTellError(f"its layout is new: {measured}")
    described, pointers = [f"layout of {known[0].name}"], []
    for library, name in (("gloo", "libtorch_cpu.so"), ("nccl", "libtorch_cuda.so")):
        path = folder / name
        if path.exists():
            with path.open("rb") as file:
                pointer, registry = symbols_child.places(file.fileno(), library, 0)
            pointers.append(pointer)
            places = "no recorder" if pointer is None else "pointer" if registry is None else "pointer and registry"
            described.append(f"{name}: {places}")
    if not any(pointers):
        raise CannotTellError("no library has a known symbol of a recorder")
    return "; ".join(described)


def main() -> int:
    """Print the table to stdout, and skipped versions to stderr."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("sources", nargs="+", metavar="VERSION|WHEEL|FOLDER")
    options.add_argument("--known", action="store_true", help="compare with the table instead of printing one")
    arguments = options.parse_args()
    found: dict[str, dict[str, int]] = {}
    names: list[str] = []
    left_out = 0
    for source in arguments.sources:
        try:
            with headers(source) as (version, include):
                if arguments.known:
                    print(f"torch {version} is known: {describe_known(layout(include), include.parent / 'lib')}")
                    continue
                found[version] = layout(include)
                names = max(names, dtypes(include), key=len)
        except CannotTellError as error:
            print(f"{source}: {error}", file=sys.stderr)
            left_out += 1
    print("" if arguments.known else toml(found, names), end="")
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
