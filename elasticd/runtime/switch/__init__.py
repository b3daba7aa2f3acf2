"""Plan switches on one rank: the next plan is prepared, its state moved, and earlier state kept."""
