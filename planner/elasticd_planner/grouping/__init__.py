"""TP groups inside a node: which groups its devices can form, and the best partitions of it."""
