"""The key of a stack has only the parts that are the same on every rank."""

import pytest

from hangwatch.model import Frame
from hangwatch.stacks import frames as stack_frames


def stack(*lines: str) -> tuple[Frame, ...]:
    parts = [line.rstrip(")").rpartition(" (") for line in lines]
    return tuple(Frame(function=function, file=file, line=7) for function, _, file in parts)


def names(*lines: str) -> list[str]:
    return [f"{function} ({file})" for function, file in stack_frames.key_places(stack(*lines))]


@pytest.mark.parametrize(
    "outer",
    [
        ("<module> (train.py)",),
        ("wrapper (torch/distributed/elastic/multiprocessing/errors/__init__.py)", "<module> (train.py)"),
        ("_run_code (<frozen runpy>)", "_run_module_as_main (<frozen runpy>)"),
        ("run_path (runpy.py)", "main (python3.11)", "__libc_start_main (libc.so.6)"),
        ("run (multiprocessing/process.py)", "_bootstrap (multiprocessing/process.py)", "spawn_main (multiprocessing/spawn.py)"),
        ("run (threading.py)", "_bootstrap_inner (threading.py)", "_bootstrap (threading.py)"),
        ("invoke (click/core.py)", "main (click/core.py)", "__call__ (click/core.py)", "<module> (cli)"),
        ("_call_with_frames_removed (<frozen importlib._bootstrap>)", "import_module (importlib/__init__.py)", "<module> (cli.py)"),
    ],
)  # fmt: skip
def test_how_a_rank_was_launched_does_not_count(outer: tuple[str, ...]) -> None:
    assert names("barrier (x.py)", "train (train.py)", *outer)[:2] == ["barrier (x.py)", "train (train.py)"]
    assert len(names("barrier (x.py)", "train (train.py)", *outer)) <= 3


def test_a_stack_of_launcher_frames_alone_is_kept() -> None:
    assert names("<module> (train.py)") == ["<module> (train.py)"]


def test_native_frames_and_addresses_do_not_count() -> None:
    lines = [
        "0x7f12 (libcuda.so.550)",
        "poll (libc.so.6)",
        "ncclAllReduce (nccl/src/collectives.cc)",
        "all_reduce (a.py)",
    ]
    assert names(*lines) == ["all_reduce (a.py)"]


def test_a_stack_of_native_frames_alone_keeps_what_is_the_same() -> None:
    spinning = names("0x7f12 (libcuda.so.550)", "ncclGroupEnd (libnccl.so.2)", "0x55 (?)")
    waiting = names("clock_gettime (linux-vdso.so.1)", "0x7f99 (libcuda.so.550)", "ncclGroupEnd (libnccl.so.2)")
    assert spinning == waiting == ["ncclGroupEnd (libnccl.so.2)"]


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        ("/opt/conda/lib/python3.10/site-packages/torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        ("/usr/lib/python3/dist-packages/x.py", "x.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/tmp/torchinductor_ann/3x/c3xabc.py", "<inductor>"),
        (f"c{'3x' * 25}a.py", "<inductor>"),
        ("collate.py", "collate.py"),
        ("<eval_with_key>.12", "<eval_with_key>"),
        ("/home/ann/train.py", "/home/ann/train.py"),
    ],
)
def test_short_paths(file: str, short: str) -> None:
    assert stack_frames.short_path(file) == short


@pytest.mark.parametrize(
    ("function", "plain"),
    [("wait", "wait"), ("Condition.wait", "wait"), ("f.<locals>.g", "g"), ("<module>", "<module>")],
)
def test_plain_names(function: str, plain: str) -> None:
    assert stack_frames.plain_name(function) == plain


@pytest.mark.parametrize(
    ("place", "called"),
    [
        (("Loop.<locals>.<lambda>", "train.py"), None),
        (("<listcomp>", "train.py"), None),
        (("Loop.step", "train.py"), "step"),
        (("<module>", "train.py"), "<module>"),
        (("0x7f12ab", "libcuda.so.550"), None),
        (("ncclAllReduce", "libnccl.so.2"), "ncclAllReduce"),
        (("c10d::Reducer::finalize_backward()", "libtorch_cpu.so"), "c10d::Reducer::finalize_backward"),
        (("c10d::WorkNCCL::isCompleted() const", "libtorch_cuda.so"), "c10d::WorkNCCL::isCompleted"),
        (("acme::Ring<int>::wait(long const&) const &", "libacme.so"), "acme::Ring::wait"),
        (("void c10d::send<at::Tensor, std::vector<int> >(int)", "libtorch_cpu.so"), "c10d::send"),
        (("std::_Function_handler<void (), c10d::Reducer::delay_all_reduce()>::_M_invoke", "libtorch_cpu.so"), None),
        (("c10d::Reducer::autograd_hook(unsigned long)::{lambda()#1}::operator()", "libtorch_cpu.so"), None),
    ],
)
def test_the_name_by_which_a_function_is_known(place: tuple[str, str], called: str | None) -> None:
    assert stack_frames.display_name(place) == called


def test_a_name_that_a_process_chose_costs_no_time() -> None:
    assert stack_frames.display_name(("f" + "<" * 200_000 + ">" * 200_000, "mine.so")) is not None


@pytest.mark.parametrize(
    ("files", "installed", "users"),
    [
        (["threading.py", "torch/x.py", "train.py"], None, [False, None, None]),
        (["threading.py", "torch/x.py", "train.py"], 2, [False, False, True]),
        (["threading.py", "torch/x.py"], 2, [False, False]),
        (["json/encoder.py", "logging/__init__.py", "code/train.py"], None, [False, False, None]),
        (["job/distributed/bus.py", "torch/x.py", "job/train.py", "train.py"], 0, [True, None, True, None]),
        (["helpers.py", "lightning/x.py", "train.py", "runpy.py"], 0, [True, None, True, False]),
        (["/opt/lib/python3.13t/queue.py", "/opt/lib/python3.11/site-packages/torch/x.py"], None, [False, False]),
        (["/home/user/torch/train.py", "<string>", "<frozen runpy>"], None, [True, None, False]),
        (["/tmp/torchinductor_me/ab/cab.py", "train.py"], None, [None, None]),
        ([f"c{'3x' * 25}a.py", "train.py"], None, [None, None]),
    ],
)
def test_frames_are_attributed_to_user_or_library(
    files: list[str], installed: int | None, users: list[bool | None]
) -> None:
    assert list(stack_frames.find_owners(files, installed)) == users
