"""Fitting the constants of presets to measured runs: what `mpctl calibrate` does."""
