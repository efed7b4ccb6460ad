"""T5: an encoder and a decoder that attends to it, trained to write the spans that text lacks."""
