"""Process groups that members make alone: over gloo or one process's memory, freed at a fault."""
