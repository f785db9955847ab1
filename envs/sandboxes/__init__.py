"""Sandboxes: where a policy's code runs."""
