"""What a simulation gives: timeline and totals, beside baselines and the bound."""
