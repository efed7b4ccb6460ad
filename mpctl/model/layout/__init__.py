"""A job's layout as one value: operator table, stages, replicas, ZeRO stage, gradient buckets."""
