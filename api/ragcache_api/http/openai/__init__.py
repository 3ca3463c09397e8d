"""OpenAI's interface: its requests and responses, tools, and routes."""
