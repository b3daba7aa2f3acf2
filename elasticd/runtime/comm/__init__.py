"""Process groups that members make alone: over gloo, NCCL or one process's memory, freed at a fault."""
