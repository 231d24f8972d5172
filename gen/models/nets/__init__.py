"""Networks: nn.Module only."""
