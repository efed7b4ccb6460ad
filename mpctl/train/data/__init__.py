"""Text to token files to samples: corpus, tokenizer, indexed files, packing; for any layout."""
