"""Judges: who says whether a text is good, and which style it is in."""
