"""The daemon on each node: its workers, its senses, its link to the coordinator."""
