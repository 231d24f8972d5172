"""Cost model: time of samplers on a device, from counted kernels and measured forward passes."""
