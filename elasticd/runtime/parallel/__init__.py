"""Parallelism on one device: tensor parallelism, gradient reduction and ZeRO.

Tensor parallelism is `tp_hooks` (which modules of a block are cut, and where collectives stand) and
`redistribute` (the collectives); data parallelism is `gradient_reduction`; `zero` says who keeps which
optimizer state. Pipeline parallelism is `runtime.engine`. Context and expert parallelism do not exist yet:
docs/architecture.md names the files that a new dimension touches.
"""
