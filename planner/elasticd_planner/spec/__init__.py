"""The vocabulary of a plan: cluster, box, model, plan, batch, and what a step measured."""
