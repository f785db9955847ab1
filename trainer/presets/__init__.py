"""Presets: named configurations, one TOML file each."""
