"""Models whose weights are split over several processes: transformers' own tensor parallelism.

Every process (rank) runs the same program and holds a part of each large weight; forward passes
exchange what is missing. Logits are reduced to the same bits on all ranks, and draws are functions
of seed and position, so every rank draws the same tokens. What could make ranks differ is checked:
the files of the weights after loading, and the inputs of every forward pass before it runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value
from gen.models.load.networks import config_field

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by torchrun
EDGE = 1 << 20  # bytes at both ends of a file that its digest reads
EXPECTED = "'auto', true, or the number of processes, at least 2"
HOW = "torchrun --nproc-per-node 2 starts two on one machine"


def processes() -> int:
    """Count the processes of the default group, or of the launcher that has made none yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(map(os.environ.get, LAUNCHED)) else 1


@dataclass
class Ranks:
    """Processes that hold one model together.

    Attributes:
        world: number of them.
        lead: where rank 0 alone decides what is computed and the others repeat its calls
            (``gen.models.adapters.lead``), its side of that; None where every rank runs the same
            program.
    """

    world: int
    lead: Any = None

    @classmethod
    def of(cls, tp: Any) -> Ranks:
        """Read the option ``tp``.

        Raises:
            GenError: another value, or another number of processes than it says.
        """
        is_count = isinstance(tp, int) and not isinstance(tp, bool)
        if tp != "auto" and tp is not True and (not is_count or tp < 2):
            raise bad_value("tp", tp, EXPECTED)
        world = processes()
        if world == 1:
            raise GenError(f"tp is {tp!r}, and this process is alone; expected several: {HOW}")
        if is_count and tp != world:
            raise GenError(f"tp is {tp}, and there are {world} processes; expected tp={world}")
        return cls(world)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of ``from_pretrained`` that split the weights."""
        config = import_module("transformers.distributed").DistributedConfig
        return {"distributed_config": config(tp_size=self.world, tp_plan="auto")}

    def require_plan(self, config: Any, name: str) -> None:
        """Raise ``GenError`` where transformers has no plan for a config, or where its plan would
        split an attention head."""
        config = config.get_text_config()
        plan = config.base_model_tp_plan
        if not plan:
            raise GenError(
                f"transformers has no plan that splits a {config.model_type!r}, as model {name} is;"
                " expected no tp (device_map spreads whole layers), or another model"
            )
        split = {key.rpartition(".")[2] for key, style in plan.items() if style == "colwise"}
        heads = config.num_attention_heads
        groups = config_field(config, "num_key_value_heads") or heads
        for part, count in (("q_proj", heads), ("query_key_value", heads), ("k_proj", groups)):
            if part in split and count % self.world:
                kind = "key-value" if part == "k_proj" else "attention"
                raise GenError(
                    f"model {name} has {count} {kind} heads; expected a multiple of"
                    f" {self.world}, the number of processes"
                )

    def agree(self, what: str, *values: bytes) -> None:
        """Compare values between the ranks, all of which must make the call.

        Args:
            what: what the values are, in the message.
            values: the values of this rank.

        Raises:
            GenError: some ranks have others; on every rank.
        """
        number = int.from_bytes(hashlib.sha256(b"\0".join(values)).digest()[:7], "big")
        extremes = torch.tensor([number, -number], device=device_of_rank())
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        high, low = extremes.tolist()
        if high != -low:
            raise GenError(
                f"the {self.world} processes of a model with tp differ in {what}; expected the"
                " same calls in the same order, with the same prompts, parameters, seeds and files"
            )

    def agree_on_tokens(self, tokens: Tensor) -> None:
        """Compare the tokens that a call has drawn; see ``agree``."""
        if self.lead is None:
            self.agree("the tokens that they drew", _bytes(tokens))

    def same(self, number: int) -> int:
        """Return the number of rank 0 on every rank that runs the same program."""
        if self.lead is not None:
            return number
        shared = torch.tensor([number], device=device_of_rank())
        dist.broadcast(shared, 0)
        return int(shared)

    def watch(self, network: nn.Module) -> None:
        """Compare the inputs of a network before every forward pass."""

        def compare(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
            tensors = [inputs.get(k) for k in ("input_ids", "inputs_embeds", "position_ids")]
            found = [_bytes(x) for x in (*args, *tensors) if isinstance(x, Tensor)]
            self.agree("the inputs of a forward pass", *found)

        network.register_forward_pre_hook(compare, with_kwargs=True)


def is_split(network: nn.Module) -> bool:
    """Return whether this process has parts of a network's weights alone."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; split weights need it
    return module is not None and any(
        isinstance(weight, module.DTensor) for weight in network.parameters()
    )


def device_of_rank() -> torch.device:
    """Return the device of this process: its own accelerator where the machine has any, as in
    transformers."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type == "mps":  # which has no process groups
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))


def own_device(asked: torch.device, tp: Any) -> torch.device:
    """Return the device that was asked for, and with ``tp`` that of this process, which is where
    transformers puts its part of a model.

    Raises:
        GenError: they differ.
    """
    if tp is None:
        return asked
    own = device_of_rank()
    if asked.type != own.type or asked.index not in (None, own.index):
        raise GenError(
            f"device is {str(asked)!r}, and tp puts the weights of this process on {str(own)!r};"
            " expected device='auto'"
        )
    return own


def digest_of_files(paths: Iterable[Path]) -> bytes:
    """Digest files by name, size and both ends, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda p: (p.name, str(p))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE))
            if size > EDGE:
                file.seek(max(EDGE, size - EDGE))
                digest.update(file.read())
    return digest.digest()


def _bytes(x: Tensor) -> bytes:
    """Return the bytes of a tensor, with its shape."""
    flat = x.detach().contiguous().cpu().flatten().view(torch.uint8)
    return str(tuple(x.shape)).encode() + flat.numpy().tobytes()
