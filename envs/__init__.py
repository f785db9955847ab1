"""Environments: what an agent acts in."""
