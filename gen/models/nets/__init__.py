"""Networks, as plain ``nn.Module``."""
