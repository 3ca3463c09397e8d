"""What goes over the wire, as pydantic models."""
