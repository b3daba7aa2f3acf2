"""The API of a training script: job, options, steps, evaluation, metrics, EMA weights, state dicts."""
