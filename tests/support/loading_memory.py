"""How much memory loading takes, as multiples of the weights loaded: run as a script, since peaks
belong to a process.

    python tests/support/loading_memory.py FOLDER:DTYPE:library|own|naive ...

writes two for each: the most that was resident, and the most of it that the kernel could not have
taken back (pages that are mapped of a file it can).
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path


def resident(key: str) -> int:
    """Bytes: ``VmRSS`` now, or ``VmHWM``, the most since the last reset."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return 1024 * int(line.split()[1])


class Watch(threading.Thread):
    """The most anonymous memory, looked at every millisecond."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, resident("RssAnon"))
            time.sleep(0.001)


def main(folder: str, dtype: str, how: str) -> tuple[float, float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    from gen.models.load.pretrained import pretrained
    from gen.models.load.weights import Weights, fill, weight_files, without_storage

    config = AutoConfig.from_pretrained(folder)
    LlamaForCausalLM(
        AutoConfig.for_model(
            "llama",
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=8,
        )
    )  # imports
    wanted, watch = getattr(torch, dtype), Watch()
    before, bare = resident("VmRSS"), resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    watch.start()
    if how == "library":
        model = pretrained(AutoModelForCausalLM, folder, dtype=wanted)
    elif how == "own":
        model = fill(
            without_storage(lambda: LlamaForCausalLM(config)), Weights(folder), dtype=wanted
        )
    else:  # as loading scripts do it
        model = LlamaForCausalLM(config)
        model.load_state_dict(torch.load(weight_files(folder)[0], weights_only=True))
        model = model.to(wanted)
    watch.over = True
    watch.join()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return (resident("VmHWM") - before) / size, (watch.most - bare) / size


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print("{:.3f} {:.3f}".format(*main(*argument.rsplit(":", 2))))
