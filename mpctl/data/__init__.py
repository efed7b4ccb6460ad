"""Text to token files to samples: corpus, tokenizer, indexed files, packing. Knows no layout."""
