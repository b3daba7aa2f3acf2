"""Tests of the dashboard: its server here, its pages in a browser in `browser`."""
