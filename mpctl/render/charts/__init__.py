"""Charts of reports as plain data, drawn as SVG and PNG."""
