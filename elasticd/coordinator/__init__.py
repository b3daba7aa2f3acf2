"""The coordinator: a daemon that is elected, hears the agents, and does what its machine decides."""
