"""What a worker does: its mesh from the topology, its data, the training loop, its records."""
