"""Tests of the rendezvous in restart mode."""
