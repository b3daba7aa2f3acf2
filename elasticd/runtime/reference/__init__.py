"""One step of a job tried beforehand: under small plans, and by the user's own modules without the engine."""
