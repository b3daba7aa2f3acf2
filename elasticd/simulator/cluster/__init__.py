"""The simulated cluster: the real state machines of leader, agents and workers, and what happens to them."""
