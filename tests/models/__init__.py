"""Models of every kind under every layout."""
