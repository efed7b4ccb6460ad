"""Charts of reports: what is drawn as plain data, and two ways of drawing it, SVG and PNG."""
