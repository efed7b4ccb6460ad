"""Strict, frozen models of a job: cluster, model, parallel layout, training, data and launch."""
