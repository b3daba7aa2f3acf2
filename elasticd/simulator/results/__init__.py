"""The results of a simulation: timeline and totals, beside baselines and the bound."""
