"""Engines: what samples tokens."""
