"""Text from a trained model: tokens drawn one after another, keys and values kept in caches."""
