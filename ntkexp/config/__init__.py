"""YAML and KEY=VALUE become an experiment of typed components, by `ntkexp.config.compose.compose`.

In reading order: `plain_yaml`, `choices`, `field_types`, `build`, `compose`.
"""
