"""Models in several processes, led by rank 0: what a job or a server loads with ``tp``."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gen.core.errors import GenError
from gen.models.adapters.lead import Call, Follower, Lead, Messages
from gen.models.load.tensor_parallel import HOW, device_of_rank, processes
from gen.pipeline import pipeline

START = timedelta(hours=2)  # loading takes some processes longer than others


class Leader:
    """Loads models on all processes. Belongs to rank 0."""

    def __init__(self, messages: Messages):
        self.messages, self.count = messages, 0

    def load(self, modality: Any, **how: Any) -> pipeline.Pipeline:
        """Call ``gen.load``, with ``tp`` on every process. Raises ``GenError`` as it does."""
        if how.get("tp") is None:
            return pipeline.load(modality, **how)
        with self.messages.lock:
            self.count += 1
            device = str(how.get("device", "auto")).partition(":")[0]
            self.messages.send((self.count, modality, {**how, "device": device}))
            pipe = pipeline.load(modality, **how)
        assert pipe.ranks is not None, "the model was loaded with tp"
        pipe.ranks.lead = Lead(self.messages, self.count)
        return pipe


@contextmanager
def led() -> Iterator[Leader | None]:
    """Yield the leader on rank 0, and None on the others, once it has finished.

    Raises:
        GenError: this process is alone.
    """
    if processes() == 1:
        raise GenError(f"model_options.tp is given, and this process is alone; {HOW}")
    _join()
    messages = Messages()
    if dist.get_rank():
        _follow(messages)
        yield None
        return
    try:
        yield Leader(messages)
    finally:
        with suppress(RuntimeError), messages.lock:  # processes that have died need not be told
            messages.send(None)


def _join() -> None:
    """Make the default process group, as transformers does, unless there is one."""
    if dist.is_initialized():
        return
    device = device_of_rank()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=START)


def _follow(messages: Messages) -> None:
    """Load what rank 0 loads and repeat its calls, until it ends."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets it too, and ends this process
            signal.signal(number, signal.SIG_IGN)
    follower = Follower(messages, device_of_rank())
    while True:
        message, gone = messages.receive()
        follower.drop(gone)
        if message is None:
            return
        if isinstance(message, Call):
            follower.repeat(message)
            continue
        number, modality, how = message
        with suppress(GenError):  # rank 0 meets the same error, and says it
            found = pipeline.load(modality, **how).checkpoint
            assert found is not None, "only published models are loaded with tp"
            follower.models[number] = found.adapter(found.protocols[0])
