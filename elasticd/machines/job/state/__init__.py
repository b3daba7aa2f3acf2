"""The state of a job as its leader knows it, with the events and effects of one step."""
