"""Where decisions are remembered: one protocol, one file per implementation."""
