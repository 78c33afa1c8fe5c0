# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes that talk through gloo.

Processes are forked from a server that has imported everything once: importing PyTorch and Transformers anew in each
process of each test would take longer than the tests.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def run_ranks(world_size: int, job: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """`[job(rank, *args) for rank in range(world_size)]`, each in a process of its own with a gloo group of all.

    Args:
        world_size: Number of processes.
        job: A function at the top level of a module.
        *args: Arguments that can be pickled.
        timeout: Seconds until a job that does not answer counts as failed.

    Returns:
        What the jobs return (pickled), by rank.

    Raises:
        AssertionError: A job raised; the message holds the traceback of the first that did.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.jobs"])
    # The server looks for what it preloads where the environment says; its children get this process's `sys.path`.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_start_rank, args=(rank, world_size, port, sender, job, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        results = []
        waiting = dict(enumerate(pipes))
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting:
            ready = multiprocessing.connection.wait(waiting.values(), timeout)
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting)} gave no answer in {timeout} s")
            for rank, pipe in [(rank, pipe) for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                except EOFError:
                    answers[rank] = (False, "the process died")
                del waiting[rank]
                if not answers[rank][0]:
                    raise AssertionError(f"rank {rank} of {world_size}:\n{answers[rank][1]}")
        results = [answers[rank][1] for rank in range(world_size)]
        for process in processes:
            process.join(timeout)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _start_rank(rank: int, world_size: int, port: int, sender: Any, job: Callable[..., Any], args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    # Where there are GPUs, Transformers would put its meshes on them.
    torch._C._get_accelerator = lambda *args: torch.device("cpu")
    # Each collective over two axes of a mesh warns that one over both at once would be faster.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        answer = (True, job(rank, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    # As bytes: tensors sent as such live in shared memory of a process that is about to end.
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    sender.send_bytes(buffer.getvalue())
    sender.close()
