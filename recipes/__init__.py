"""Recipes: one YAML file each, found by its name. Copy one to start your own."""
