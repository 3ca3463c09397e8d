"""From Python to PML (Prompt Cache, §3.2.4): a function is a schema, and a call of it a prompt."""

from ragcache_schemas.compiler.program import (
    Content,
    MaxTokens,
    PromptProgram,
    prompt_program,
    turn,
)

__all__ = ["Content", "MaxTokens", "PromptProgram", "prompt_program", "turn"]
