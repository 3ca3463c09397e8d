"""From Python to PML (Prompt Cache, §3.2.4): a function is a schema, and a call of it a prompt."""
