"""Lower bounds: proofs that no plan takes less time."""
