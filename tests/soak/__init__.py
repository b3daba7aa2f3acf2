"""The soak: a real or a simulated job under random faults, and the checks of what must hold."""
