"""BERT: an encoder that sees both sides, trained on masked tokens and pairs of texts."""
