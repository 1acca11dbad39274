"""Recipes, the trainer and its tasks, evaluation."""
