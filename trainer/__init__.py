"""Trainer: asynchronous SAO, from trajectories to published weights."""
