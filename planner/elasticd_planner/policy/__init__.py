"""The policy: whether a new plan is worth the price of the switch."""
