"""Measurements of the faces."""
