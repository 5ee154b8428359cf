"""YAML and KEY=VALUE become an experiment of typed components, by `ntkexp.config.compose.compose`."""
