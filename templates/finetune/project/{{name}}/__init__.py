"""The project's package: what config.yaml names."""
