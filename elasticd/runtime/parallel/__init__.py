"""Parallelism on one device: tensor, sequence and context parallelism, gradient reduction and ZeRO.

Tensor parallelism is `tp_hooks` (which modules of a block are cut, and where collectives stand) and
`redistribute` (the collectives, of sequence parallelism too). Context parallelism, of sequences that are cut
over lanes, is `context_parallel` and the files named `attention...`. Data parallelism is `gradient_reduction`.
`zero` says which rank keeps which optimizer state. Pipeline parallelism is `runtime.engine`.
docs/architecture.md names the files that a new dimension touches.
"""
