"""GLM: one stack of blocks that sees a text with blanks both ways and writes the blanks in turn."""
