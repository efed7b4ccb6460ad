"""Starting ranks on hosts, watching them, and what becomes of a run. No torch."""
