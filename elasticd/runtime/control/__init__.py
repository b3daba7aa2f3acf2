"""The worker's channel to its agent, and what ends a worker: SIGTERM, its parent, the user's exceptions."""
