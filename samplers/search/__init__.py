"""Search and steering: samplers that run another one and judge what it makes."""
