"""A job tried beforehand: one step under small plans and by the user's own modules; its sections' bytes."""
