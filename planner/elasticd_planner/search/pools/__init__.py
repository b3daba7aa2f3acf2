"""Node pools: the pipelines that some nodes form among themselves, as arrays over counts of equal groups."""
