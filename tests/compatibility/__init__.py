"""Releases that are frozen, one folder each: a state folder, recordings of REST, signatures."""
