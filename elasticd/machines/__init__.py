"""The pure state machines that daemons and the simulator run."""
