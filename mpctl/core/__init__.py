"""Laws that both halves share: ranks, axes, shards, messages, units, errors, files and locks."""
