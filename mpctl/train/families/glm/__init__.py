"""GLM as ranks run it: its module and its samples."""
