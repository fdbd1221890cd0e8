"""Recipes: how a model is served, why each flag is there, what to expect of it, and what was measured."""
