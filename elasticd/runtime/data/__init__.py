"""Data: datasets and streams, the samples of each step, batches, and the ledger of samples."""
