"""Measurements in ranks, for benches and the doctor; training imports none of them."""
