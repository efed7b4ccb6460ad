"""Model families as ranks run them: a folder each, beside its description in mpctl/model/families."""
