"""Waits of two or three steps, for a process, thread or driver that waits itself, by the standard library."""

import _thread
import collections
import ctypes
import operator
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hangwatch.tools.demo import loader
from hangwatch.tools.demo.process_setup import set_identity
from hangwatch.tools.demo.worker import Rank

SERVER = "127.0.0.2"


def connected(port: str) -> socket.socket:
    """Return a connection to a server outside the job. A request was sent on it."""
    server = socket.create_connection((SERVER, int(port)))
    server.sendall(b"a question")
    return server


def ask(port: str) -> None:
    """Send a request to a server and wait for the response without a timeout."""
    connected(port).recv(1)


def back_off(seconds: str) -> None:
    """Sleep once, as between two attempts to reach a server."""
    time.sleep(float(seconds))


def upload(port: str) -> None:
    """Send more to a server than the buffers on both sides take."""
    connected(port).sendall(bytes(8 << 20))


def open_dead(path: str) -> None:
    """Open a FIFO without a writer."""
    Path(path).read_bytes()


def start_program(path: str) -> None:
    """Start a program with a FIFO without a writer as its input: this process is in state D until that is open."""
    redirected = (os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[redirected])


def stop(_: str) -> None:
    """Stop this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_traced(_: str) -> None:
    """Stop this process, and let its parent be its tracer, see ptrace(2)."""
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


TASKS: dict[str, Callable[[str], None]] = {
    "asks": ask,
    "uploads": upload,
    "sleeps": back_off,
    "opens": open_dead,
    "starts": start_program,
    "stops": stop,
    "traced": stop_traced,
}


def await_loader(me: Rank, task: str, argument: str) -> None:
    """Wait for the loader worker, which does a task first."""
    loader.next_batch(me.loader, f"{task} {argument}")


def fork(me: Rank, run: Callable[[], object], *unused: int) -> None:
    """Start a process of the same program that calls `run`. It closes the descriptors `unused` first."""
    rank = os.getpid()
    if os.fork() == 0:
        set_identity("python", rank, me.folder)
        for descriptor in unused:
            os.close(descriptor)
        run()
        os._exit(0)


def await_process(me: Rank, task: str, argument: str) -> None:
    """Wait at a queue for a forked process of the same program, which does a task first."""
    reads, writes = os.pipe()
    fork(me, lambda: (TASKS[task](argument), os.write(writes, b".")), reads)
    os.close(writes)
    os.read(reads, 1)


def fill_pipe(me: Rank, task: str, argument: str) -> None:
    """Write to a full pipe, which a forked process of the same program reads after a task."""
    reads, writes = os.pipe()
    fork(me, lambda: (TASKS[task](argument), os.fdopen(reads, "rb").read()), writes)
    os.close(reads)
    left = bytes(1 << 20)
    while left:
        left = left[os.write(writes, left) :]
    os.close(writes)


def fill_queue(me: Rank, task: str, argument: str) -> None:
    """Put into a full queue of multiprocessing, from which a forked process takes after a task."""
    queue = _prepare(me)[0].Queue(1)
    fork(me, lambda: (TASKS[task](argument), queue.get()))
    queue.put(1)
    queue.put(2)
    queue.cancel_join_thread()


def do_task(task: str, argument: str) -> None:
    """Do a task in a worker of a pool."""
    TASKS[task](argument)


class Runner:
    """An object in the process of a manager, which does tasks."""

    run = staticmethod(do_task)


def await_pool(me: Rank, task: str, argument: str) -> None:
    """Wait for a task in a pool of processes."""
    context, named = _prepare(me)
    with context.Pool(2, named) as pool:
        pool.starmap(do_task, [(task, argument)])


def await_executor(me: Rank, task: str, argument: str) -> None:
    """Wait for a task in an executor with processes."""
    from concurrent.futures import ProcessPoolExecutor  # only this way needs it

    context, named = _prepare(me)
    with ProcessPoolExecutor(2, context, named) as pool:
        pool.submit(do_task, task, argument).result()


def await_manager(me: Rank, task: str, argument: str) -> None:
    """Wait for an object in the process of a manager, which does a task in a thread."""
    from multiprocessing.managers import BaseManager  # only this way needs it

    context, named = _prepare(me)
    BaseManager.register("runner", Runner)
    manager = BaseManager(ctx=context)
    manager.start(named)
    manager.runner().run(task, argument)  # type: ignore[attr-defined]


def await_loop(_: Rank, way: str, port: str) -> None:
    """Wait for an event loop in another thread, as fsspec does. It asks a server; with "never" it then waits for good.

    With the way "thread", another thread waits for the loop, and the main thread for that.
    """
    import asyncio  # few ways need them
    from concurrent.futures import ThreadPoolExecutor

    async def ask_server() -> None:
        reader, writer = await asyncio.open_connection(SERVER, int(port))
        writer.write(b"a question")
        await reader.read(1)
        await (asyncio.Event().wait() if way == "never" else asyncio.sleep(0))

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    if way == "thread":
        ThreadPoolExecutor(1).submit(lambda: asyncio.run_coroutine_threadsafe(ask_server(), loop).result()).result()
    else:
        asyncio.run_coroutine_threadsafe(ask_server(), loop).result()


def _prepare(me: Rank) -> tuple[Any, Callable[[], None]]:
    """Return how processes are started, and a function that each calls first, so that the simulated node shows it."""
    import multiprocessing  # few ways need it

    return multiprocessing.get_context("fork"), partial(set_identity, "python", os.getpid(), me.folder)


def run_natively(*calls: Callable[[], object]) -> None:
    """Run these functions of compiled code in a thread that never enters Python code."""
    _thread.start_new_thread(collections.deque, (map(operator.methodcaller("__call__"), calls), 0))


def await_client(_: Rank, way: str, port: str) -> None:
    """Wait for an epoll in compiled code by a lock, as an object store's client, or an eventfd, as zmq."""
    events, server = select.epoll(), connected(port)
    events.register(server, select.EPOLLIN)
    if way == "eventfd":
        answered = os.eventfd(0)
        run_natively(events.poll, partial(os.eventfd_write, answered, 1))
        waiting = select.poll()
        waiting.register(answered, select.POLLIN)
        waiting.poll()
    else:
        lock = _thread.allocate_lock()
        lock.acquire()
        run_natively(events.poll, lock.release)
        lock.acquire()


def await_hidden(_: Rank, seconds: str, _argument: str) -> None:
    """Wait for a socket that no process holds: it is on its way in another socket, as between two processes."""
    ours, theirs = socket.socketpair()
    sender, receiver = socket.socketpair()
    socket.send_fds(sender, [b"."], [theirs.fileno()])
    theirs.close()
    threading.Timer(float(seconds), lambda: os.write(socket.recv_fds(receiver, 1, 1)[1][0], b".")).start()
    ours.recv(1)


def lock_beside(server: socket.socket, way: str) -> None:
    """Wait for a lock that nothing releases, while a thread of compiled code exchanges heartbeats with a server."""
    events = select.epoll()
    events.register(server, select.EPOLLIN)
    pause, receive, send = partial(time.sleep, 0.1), partial(server.recv, 1), partial(server.sendall, b".")
    calls = (events.poll, receive, pause, send)
    run_natively(*(calls * 1000))
    if way == "eventfd":
        os.eventfd_read(os.eventfd(0))
    lock = _thread.allocate_lock()
    lock.acquire()
    lock.acquire()


def await_in_circle(me: Rank, _task: str, _argument: str) -> None:
    """Wait for a process that waits for this rank."""
    questions, answers = os.pipe(), os.pipe()
    fork(me, lambda: os.read(questions[0], 1), questions[1], answers[0])
    os.close(questions[0])
    os.close(answers[1])
    os.read(answers[0], 1)


WAYS: dict[str, Callable[[Rank, str, str], None]] = {
    "loader": await_loader,
    "process": await_process,
    "pipe": fill_pipe,
    "queue": fill_queue,
    "pool": await_pool,
    "executor": await_executor,
    "manager": await_manager,
    "loop": await_loop,
    "client": await_client,
    "hidden": await_hidden,
    "heartbeat": lambda _, way, port: lock_beside(connected(port), way),
    "exporter": lambda _, way, port: lock_beside(connected(port), way),
    "circle": await_in_circle,
}
