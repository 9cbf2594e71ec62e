"""Observing a training step: ranges, sensitivities, saved tensors, and the seconds of each op."""
