"""The exhaustive search of small clusters: every TP group, stage order and set of pipelines."""
