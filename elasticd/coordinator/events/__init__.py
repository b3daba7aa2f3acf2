"""The coordinator's log of events and steps: in memory, in the store, and the gain of each switch."""
