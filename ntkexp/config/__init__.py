"""Build experiments from YAML files and KEY=VALUE overrides:
`ntkexp.config.compose.compose`.

In reading order: `plain_yaml`, `choices`, `field_types`, `build`, `compose`.
"""
