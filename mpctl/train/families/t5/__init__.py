"""T5 as ranks run it: its module and its samples."""
