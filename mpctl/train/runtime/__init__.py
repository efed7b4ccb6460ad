"""The training worker: process groups, data, training loop and step records of one rank."""
