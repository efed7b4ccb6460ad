"""The closed loop of `mpctl tune`: plan, measure the layouts that tell most, learn, plan again."""
