"""The attention backends equal the definition, and the CPU backend falls back to the reference."""
