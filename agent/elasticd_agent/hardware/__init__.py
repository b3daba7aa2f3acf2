"""The node's devices, and the sensors of its machine and accelerators."""
