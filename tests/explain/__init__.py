"""Tests of the explanations for people."""
