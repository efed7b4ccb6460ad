"""One job with all that follows from it before anything is estimated or run: stages, replicas,
buckets."""
