"""The coordinator's port: REST for people and programs, and the WebSocket of the agents."""
