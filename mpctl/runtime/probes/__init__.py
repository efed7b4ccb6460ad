"""What ranks measure for benches and the doctor; training imports none of it."""
