"""Agent sessions replayed against a server, and the report that puts arms side by side."""
