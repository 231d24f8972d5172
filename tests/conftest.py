"""Tests use one thread: on a busy machine two of them wait for each other."""

import torch

torch.set_num_threads(1)
