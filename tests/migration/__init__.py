"""Tests of the migration."""
