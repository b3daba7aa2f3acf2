"""Load balance: layers over the stages of a pipeline, micro-batches over pipelines."""
