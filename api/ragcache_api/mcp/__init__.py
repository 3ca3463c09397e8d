"""The Model Context Protocol: collections as tools and resources, over HTTP and stdio."""
