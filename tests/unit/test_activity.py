"""The activity of a stack, by the rules of activities.toml and by the user's rules in the configuration."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import config
from hangwatch.model import Frame
from hangwatch.stacks import activity, activity_table
from tests.conftest import load_table

TABLE = activity.load()


def frames(*lines: str) -> tuple[Frame, ...]:
    found = []
    for line in lines:
        function, _, rest = line.rstrip(")").rpartition(" (")
        found.append(Frame(function=function, file=rest))
    return tuple(found)


C10D = "torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(("expected", "operation", "lines"), load_table("activity_stacks.toml")["stacks"])
def test_built_in_rules(expected: str, operation: str, lines: list[str]) -> None:
    found = TABLE.classify(frames(*(line.replace("C10D", C10D) for line in lines)))
    assert found.activity == expected
    assert not operation or found.operation == operation
    assert found.waits == (found.row.waits_for == "ranks")


def test_plain_and_qualified_names_are_the_same() -> None:
    plain = TABLE.classify(frames("wait (threading.py)", "get (queue.py)", "mine (x.py)"))
    qualified = TABLE.classify(frames("Condition.wait (threading.py)", "Queue.get (queue.py)", "Loop.mine (x.py)"))
    assert plain == qualified


def test_a_file_pattern_ends_at_a_folder() -> None:
    assert TABLE.classify(frames("all (mytorch/utils/data/dataloader.py)")).activity == "unknown"


def test_rules_of_the_configuration_come_first() -> None:
    rules = (
        config.ActivityRule(activity="data_loading", function="read_*", file="*/our_loader.py", operation="our loader"),
        config.ActivityRule(activity="licence_server", function="ask_licence"),
    )
    table = activity.load(rules)
    assert table.classify(frames("read_shard (a/our_loader.py)")) == ("data_loading", "our loader", False)
    assert table.classify(frames("ask_licence (x.py)", "all_reduce (" + C10D + ")")).activity == "licence_server"
    assert activity_table.find_activity("licence_server").waits_for == "nothing"
    assert TABLE.classify(frames("read_shard (a/our_loader.py)")).activity == "unknown"


def test_a_rule_without_a_usable_name_is_refused() -> None:
    with pytest.raises(config.ConfigError, match=r"\[activities\] rules\[0\].*Loading Data"):
        activity.load((config.ActivityRule(activity="Loading Data", function="x"),))


def test_a_misspelt_activity_is_refused_since_it_would_accuse() -> None:
    with pytest.raises(config.ConfigError, match="'colective_wait' looks like a misspelt 'collective_wait'"):
        activity.load((config.ActivityRule(activity="colective_wait", function="x"),))


def test_every_rule_names_an_activity_and_every_activity_a_sentence() -> None:
    tables = activity_table.built_in()
    assert {rule.activity for rule in tables.rules} <= set(tables.activities)
    assert all(rule.functions for rule in tables.rules)
    for name in tables.activities:
        for operation in (None, "thing"):
            clause = activity_table.describe_activity(name, operation)
            assert clause.split()[0] in {"is", "waits", "stands", "sleeps", "creates"} and "{" not in clause


def test_phases() -> None:
    assert TABLE.phase(frames(f"barrier ({C10D})", "save_checkpoint (x.py)")) == "checkpoint"
    assert TABLE.phase(frames(f"barrier ({C10D})", "evaluate (x.py)", "train (x.py)")) == "evaluation"
    assert TABLE.phase(frames(f"barrier ({C10D})", "train (x.py)")) is None


@pytest.mark.parametrize(
    ("mark", "bearers", "others"),
    [
        ("wrapper", ["f (contextlib.py)", "f (/x/torch/utils/_contextlib.py)"], ["f (mycontextlib.py)"]),
        ("collective", [f"f (/lib/{C10D})", "f (torch/distributed/_functional_collectives_impl.py)"], ["f (x.py)"]),
        (
            "service",
            ["Queue._feed (q.py)", "f (wandb/a.py)", "check_is_alive (x.py)"],
            ["feed (x.py)", "f (wandb.py)", "f (/x/wandb/a.py)"],
        ),
        ("work", [f"f ({C10D})"], ["f (c10d.py)"]),
        ("rooted", ["gather_object ()", "Bcast ()"], ["all_gather ()", "reduce_scatter ()", "broadcast_from ()"]),
    ],
)
def test_marks(mark: activity_table.Mark, bearers: list[str], others: list[str]) -> None:
    assert all(activity_table.is_marked(mark, frame.function, frame.file) for frame in frames(*bearers))
    assert not any(activity_table.is_marked(mark, frame.function, frame.file) for frame in frames(*others))


@pytest.mark.parametrize(
    ("lines", "expected", "operation"),
    [
        (["<lambda> (train.py)", "retry (train.py)"], "unknown", "retry"),
        (["<genexpr> (x.py)", "Loop.<locals>.<lambda> (x.py)", "<module> (train.py)"], "unknown", "<module>"),
        (["0x7f12 (libcuda.so.550)", "<lambda> (train.py)", "to_host (train.py)"], "gpu_sync", "to_host"),
        (["0x7f12 (libcuda.so.550)"], "gpu_sync", "libcuda.so.550"),
        (
            [
                "__poll (libc.so.6)",
                "std::_Function_handler<void (), c10d::Reducer::x()>::_M_invoke (libtorch_cpu.so)",
                "std::function<void ()>::operator() (libtorch_cpu.so)",
                "c10d::Reducer::finalize_backward() (libtorch_cpu.so)",
                "mine (train.py)",
            ],
            "collective_wait",
            "c10d::Reducer::finalize_backward",
        ),
        (["<dictcomp> (torch/optim/adamw.py)", "step (torch/optim/adamw.py)"], "optimizer", "step"),
    ],
)
def test_an_activity_is_called_after_a_function_with_a_name(lines: list[str], expected: str, operation: str) -> None:
    found = TABLE.classify(frames(*lines))
    assert (found.activity, found.operation) == (expected, operation)


@pytest.mark.parametrize(
    ("line", "of_user", "of_nobody_knows", "of_library"),
    [
        ("wait_for_peers (m/distributed/groups.py)", "lock", "lock", "collective_wait"),
        ("send_object (m/distributed/groups.py)", "unknown", "point_to_point", "point_to_point"),
        ("ep_combine_gather (m/parallel_state.py)", "collective_wait", "collective_wait", "collective_wait"),
        ("save_checkpoint (m/trainer.py)", "unknown", "checkpoint", "checkpoint"),
        ("get_batch (m/trainer.py)", "unknown", "data_loading", "data_loading"),
        ("read_shard (m/data.py)", "data_loading", "data_loading", "data_loading"),
        ("all_reduce (m/trainer.py)", "collective_wait", "collective_wait", "collective_wait"),
        ("recv_requests (m/scheduler.py)", "unknown", "serving", "serving"),
        ("fetch (datasets/mine.py)", "unknown", "data_loading", "data_loading"),
    ],
)
def test_function_is_classified_by_file_owner(line: str, of_user: str, of_nobody_knows: str, of_library: str) -> None:
    found = (TABLE.classify(frames(line, "<module> (train.py)"), installed).activity for installed in (0, None, 1))
    assert tuple(found) == (of_user, of_nobody_knows, of_library)


def test_a_file_without_a_folder_is_the_whole_path() -> None:
    assert TABLE.classify(frames("get (queue.py)")).activity == "thread_wait"
    assert TABLE.classify(frames("get (/opt/lib/python3.11/queue.py)")).activity == "thread_wait"
    assert TABLE.classify(frames("get (mine/queue.py)")).activity == "unknown"
    assert TABLE.classify(frames("main (code.py)")).activity == "unknown"
    assert TABLE.classify(frames("interact (code.py)")).activity == "debugger"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("recv_next (xfuser/core/distributed/group_coordinator.py)", "point_to_point"),
        ("pipeline_communicate (picotron/pipeline_parallel/pp_communications.py)", "point_to_point"),
        ("_wait_batched_p2p (d9d/pipelining/infra/communications.py)", "point_to_point"),
        ("_pp_commit_comm_work (sglang/srt/managers/scheduler_pp_mixin.py)", "point_to_point"),
        ("recv_meta (paddle/distributed/fleet/meta_parallel/pp_utils/p2p_communication.py)", "point_to_point"),
        ("_batched_p2p_ops (megatron/core/pipeline_parallel/p2p_communication.py)", "point_to_point"),
        ("irecv_tensor_dict (vllm/distributed/parallel_state.py)", "point_to_point"),
        ("_reduce_scatter_along_first_dim (megatron/core/tensor_parallel/mappings.py)", "collective_wait"),
        ("sync_all_reduce_grads_async (unknown/comm/grads.py)", "collective_wait"),
        ("broadcast_tensor_dict (fastvideo/distributed/parallel_state.py)", "collective_wait"),
        ("redistribute (torch/distributed/tensor/_redistribute.py)", "unknown"),
        ("dispatch (torch/distributed/tensor/_dispatch.py)", "unknown"),
        ("get_tensor_model_parallel_rank (vllm/distributed/parallel_state.py)", "unknown"),
    ],
)
def test_words_tell_where_no_row_names_the_function(line: str, expected: str) -> None:
    assert TABLE.classify(frames(line, "mine (x.py)"), 1).activity == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("av/container/input.py", "data_loading"),
        ("/opt/env/lib/python3.11/site-packages/av/container/input.py", "data_loading"),
        ("models/av/fusion.py", "unknown"),
        ("/home/mira/models/av/fusion.py", "unknown"),
        ("trainer/requests/queue.py", "unknown"),
    ],
)
def test_a_library_is_a_package_of_its_own_and_no_folder_of_a_program(file: str, expected: str) -> None:
    frames = (Frame(function="fuse", file=file), Frame(function="main", file="train.py"))
    assert activity.load().classify(frames).activity == expected


def rooted_patterns() -> list[str]:
    """Return the file patterns of the table that begin with the name of a package."""
    tables = activity_table.built_in()
    rows = (*tables.rules, *tables.marks)
    found = dict.fromkeys(pattern for row in rows for pattern in (*row.files, row.file))
    return [pattern for pattern in found if pattern and not pattern.startswith(("*/", "<", "["))]


@pytest.mark.parametrize("pattern", rooted_patterns())
def test_pattern_matches_at_the_root_of_a_package_alone(pattern: str) -> None:
    row = activity_table.Rule(activity="lock", order="certain", why="one row", functions=("f",), file=pattern)
    path, table = pattern.replace("*", "x"), activity.Table((row,))
    roots = ["", "/opt/venv/lib/python3.12/site-packages/", "/usr/lib/python3/dist-packages/", "/usr/lib/python3.11/"]
    roots += ["/usr/lib/python311.zip/", "/app/train.pex/", "/pex/torch-2.13.0.whl/", "/app/train#link-tree/"]
    matched = [root for root in roots if table.classify(frames(f"f ({root}{path})")).activity == "lock"]
    assert matched == roots
    below = [f"{root}another/package/" for root in roots]
    package, folder, _ = pattern.partition("/")
    if not folder or package not in activity_table.built_in().checkouts:
        below += ["/home/ann/package/", "/opt/torch/distributed/elastic/"]
    assert [place for place in below if table.classify(frames(f"f ({place}{path})")).activity == "lock"] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f (/home/ann/Megatron-LM/megatron/core/datasets/gpt_dataset.py)", "data_loading"),
        ("barrier (/opt/pytorch/torch/distributed/distributed_c10d.py)", "collective_wait"),
        ("wrapper (/opt/pytorch/torch/distributed/elastic/multiprocessing/errors/__init__.py)", "unknown"),
        ("get (/home/ann/train/multiprocessing/queues.py)", "unknown"),
    ],
)
def test_checkout_of_a_library_is_known_in_any_folder(line: str, expected: str) -> None:
    assert TABLE.classify(frames(line)).activity == expected


@pytest.mark.parametrize(
    "file",
    [
        "torch/distributed/elastic/multiprocessing/errors/__init__.py",
        "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py",
    ],
)
def test_wrapper_of_torchrun_is_no_wait_for_a_thread(file: str) -> None:
    stack = frames("update_cache (train.py)", "train (train.py)", "main (train.py)", f"wrapper ({file})")
    assert TABLE.classify(stack) == ("unknown", "update_cache", False)


PROCESS = ["run (multiprocessing/process.py)", "_bootstrap (multiprocessing/process.py)"]
FORK = ["_launch (multiprocessing/popen_fork.py)", "__init__ (multiprocessing/popen_fork.py)"]
ACTOR = [
    "_resume_span (ray/util/tracing/tracing_helper.py)",
    "actor_method_executor (ray/_private/function_manager.py)",
    "main_loop (ray/_private/worker.py)",
    "<module> (ray/_private/workers/default_worker.py)",
]


@pytest.mark.parametrize(
    "boot",
    [
        PROCESS,
        ["_wrap (torch/multiprocessing/spawn.py)", *PROCESS],
        ["_wrap (torch/distributed/elastic/multiprocessing/api.py)", *PROCESS, "spawn_main (multiprocessing/spawn.py)"],
        [*PROCESS, *FORK],
        ["mapstar (multiprocessing/pool.py)", "worker (multiprocessing/pool.py)", *PROCESS],
        ACTOR,
        ["worker_main (vllm/v1/executor/multiproc_executor.py)", *PROCESS],
    ],
)
def test_boot_frames_never_decide_what_a_rank_does(boot: list[str]) -> None:
    assert TABLE.classify(frames("update_cache (train.py)", *boot)) == ("unknown", "update_cache", False)
    waiting = frames(f"all_reduce ({C10D})", "train (train.py)", *boot)
    assert TABLE.classify(waiting) == ("collective_wait", "all_reduce", True)


RUNPY = ["_run_code (<frozen runpy>)", "run_path (<frozen runpy>)"]
THREAD = ["run (threading.py)", "_bootstrap_inner (threading.py)", "_bootstrap (threading.py)"]
LOOP = [
    "_run_once (asyncio/base_events.py)",
    "run_forever (asyncio/base_events.py)",
    "run_until_complete (asyncio/base_events.py)",
    "run (asyncio/runners.py)",
]
PYDEVD = "/home/ann/.vscode-server/extensions/ms-python.debugpy/bundled/libs/debugpy/_vendored/pydevd/pydevd.py"
RUNNERS = {
    "asyncio": ["_run (asyncio/events.py)", *LOOP],
    "asyncio, below the program": ["_run (asyncio/events.py)", *LOOP, "<module> (train.py)"],
    "trio": ["unrolled_run (trio/_core/_run.py)", "run (trio/_core/_run.py)", "<module> (train.py)"],
    "anyio": ["run (anyio/_backends/_asyncio.py)", *THREAD],
    "a server": ["handle (http/server.py)", "process_request (socketserver.py)", "serve_forever (socketserver.py)"],
    "grpc": ["_call_behavior (grpc/_server.py)", "<module> (train.py)"],
    "pdb": ["run (bdb.py)", "_run (pdb.py)", "main (pdb.py)"],
    "debugpy": [*RUNPY, "run_file (debugpy/server/cli.py)", "main (debugpy/server/cli.py)"],
    "an editor": [f"_exec ({PYDEVD})", f"run ({PYDEVD})", f"main ({PYDEVD})"],
    "a console": ["runcode (code.py)", "push (code.py)", "interact (code.py)"],
    "mpi4py": [*RUNPY, "run_command_line (mpi4py/run.py)", "main (mpi4py/run.py)", "<module> (mpi4py/__main__.py)"],
    "mpi4py.futures": ["server_exec (mpi4py/futures/_core.py)", "main (mpi4py/futures/server.py)"],
    "a thread": THREAD,
    "a pool of threads": ["run (concurrent/futures/thread.py)", "_worker (concurrent/futures/thread.py)", *THREAD],
    "a pool of processes": ["_process_worker (concurrent/futures/process.py)", *PROCESS],
    "loky": ["_process_worker (joblib/externals/loky/process_executor.py)", "<module> (train.py)"],
}


@pytest.mark.parametrize("installed", [0, None])
@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_program_decides_below_the_code_that_runs_it(runner: list[str], installed: int | None) -> None:
    blocked = frames("load_shard (train.py)", "main (train.py)", *runner)
    assert TABLE.classify(blocked, installed) == ("unknown", "load_shard", False)
    waiting = frames(f"all_reduce ({C10D})", "main (train.py)", *runner)
    assert TABLE.classify(waiting, installed and 1) == ("collective_wait", "all_reduce", True)


@pytest.mark.parametrize(
    "runner",
    [THREAD, RUNNERS["a pool of threads"], RUNNERS["a pool of processes"], RUNNERS["mpi4py"]],
)
def test_library_decides_below_the_frames_that_started_it(runner: list[str]) -> None:
    assert TABLE.classify(frames("dot (numpy/core.py)", *runner)) == ("unknown", "dot", False)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["select (selectors.py)", *LOOP, "<module> (train.py)"], "serving"),
        (["epoll_wait (/lib/x86_64-linux-gnu/libc.so.6)", "select (selectors.py)", *LOOP], "serving"),
        (["get_events (trio/_core/_io_epoll.py)", *RUNNERS["trio"]], "serving"),
        (["_worker (concurrent/futures/thread.py)", *THREAD], "thread_wait"),
        (["get (multiprocessing/queues.py)", *RUNNERS["a pool of processes"]], "thread_wait"),
        (["wait (threading.py)", "main (train.py)", *RUNNERS["asyncio"]], "thread_wait"),
        (["switch (gevent/hub.py)", "get (queue.py)", "main (train.py)"], "thread_wait"),
        (["Barrier (mpi4py/util/sync.py)", "main (train.py)", *RUNNERS["mpi4py"]], "collective_wait"),
        (["bcast (numpy/core.py)", "bcast (mpi4py/util/pkl5.py)", "main (train.py)"], "collective_wait"),
        (["cmdloop (cmd.py)", "interaction (pdb.py)", "main (train.py)", *RUNNERS["pdb"]], "debugger"),
        (["select (prompt_toolkit/input.py)", "cmdloop (IPython/terminal/debugger.py)", "main (train.py)"], "debugger"),
        (["wait (threading.py)", f"do_wait_suspend ({PYDEVD})", "main (train.py)", *RUNNERS["an editor"]], "debugger"),
    ],
)
def test_wait_nearer_to_the_leaf_than_the_program_decides(lines: list[str], expected: str) -> None:
    assert TABLE.classify(frames(*lines)).activity == expected


@pytest.mark.parametrize(
    ("line", "of_standard_library"),
    [
        ("get (queue.py)", "thread_wait"),
        ("wait (threading.py)", "thread_wait"),
        ("set_trace (pdb.py)", "debugger"),
        ("emit (logging/handlers.py)", "logging"),
        ("recv (multiprocessing/connection.py)", "thread_wait"),
    ],
)
def test_file_of_the_program_is_not_the_module_of_that_name(line: str, of_standard_library: str) -> None:
    stack = frames(line, "main (train.py)")
    of_program, of_nobody_knows, of_library = (TABLE.classify(stack, installed) for installed in (0, None, 1))
    assert (of_program.activity, of_program.operation) == ("unknown", line.partition(" ")[0])
    assert (of_nobody_knows.activity, of_library.activity) == (of_standard_library, of_standard_library)


def test_ray_worker_without_a_task_waits_for_one() -> None:
    assert TABLE.classify(frames(*ACTOR[2:])).activity == "rpc_wait"


def test_process_that_calls_compiled_code_at_once_is_unknown() -> None:
    assert TABLE.classify(frames(*PROCESS)).activity == "unknown"
    native = frames("ncclAllReduce (libnccl.so.2)", *PROCESS)
    assert TABLE.classify(native).activity == "collective_wait"


@given(glob=st.text("ab*?[]!", min_size=1, max_size=8), name=st.text("ab[]!*", min_size=1, max_size=6))
def test_a_pattern_of_the_configuration_fits_what_fnmatch_fits(glob: str, name: str) -> None:
    table = activity.load((config.ActivityRule(activity="staging_area", function=glob),))
    assert (table.classify(frames(f"{name} (x.py)")).activity == "staging_area") == fnmatchcase(name, glob)
