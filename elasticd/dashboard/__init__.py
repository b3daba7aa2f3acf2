"""The dashboard: a process of its own that shows a cluster to browsers, and passes on what people ask for."""
