"""Reads run directories: which runs there are, and what each contains."""
