"""Pictures of a plan: pages, SVG, traces."""
