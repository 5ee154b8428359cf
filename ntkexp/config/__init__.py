"""From YAML and KEY=VALUE to an experiment of typed components: `ntkexp.config.compose.compose`."""
