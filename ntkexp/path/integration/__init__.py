"""The ways to integrate a path, each with what it refuses, what it costs and what it starts from."""
